"""Routings for the buffers of integrations, and their specification."""

from __future__ import annotations

from collections.abc import Sequence

from generator import Case
from law import Law

HIDDEN, NUM_LOCAL, NUM_TOPK = 256, 3, 4
# Of a token that names an expert twice, a map keeps one.
KINDS = ("ragged with holes", "balanced", "a rank without tokens", "ragged and skewed", "no experts")


def cases(num_ranks: int, kinds: Sequence[str] = KINDS) -> list[Case]:
    """Routings of all ranks; later ones are larger, so that the communicator grows."""
    return [
        Case(
            kind=kind,
            seed=seed,
            world_size=num_ranks,
            num_experts=NUM_LOCAL * num_ranks,
            num_topk=NUM_TOPK,
            max_tokens=8 * (seed + 1),
        )
        for seed, kind in enumerate(kinds)
    ]


def law_of(case: Case, alignment: int = 1) -> Law:
    """The specification, with equal runs of experts."""
    return Law(case.world_topk_idx, [expert // NUM_LOCAL for expert in range(case.num_experts)], alignment)
