"""Whether a way to shuffle keeps the law, looked at before it is timed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch

from fusco.bench.specification import WorldInput, apply_experts, combine_error, expected_rows
from fusco.bench.traffic import Workload


class Shuffling(Protocol):
    """A way to shuffle: dispatch gives expert-major rows, rows of each local expert, and what combine needs."""

    @property
    def dispatch(self) -> Callable[[], tuple[torch.Tensor, Iterable[Any], Any]]:
        """Token-major rows to expert-major ones; behind the last block there may be more."""

    @property
    def combine(self) -> Callable[[torch.Tensor, Any], torch.Tensor]:
        """Expert-major rows to token-major ones."""

    @property
    def num_roundings(self) -> int:
        """How often a sum of 16-bit rows may be rounded on its way: where its parts travel, and at the end."""


def verify(shuffle: Shuffling, workload: Workload, world: WorldInput, rank: int, max_spare_rows: int = 0) -> list[str]:
    """Where a rank's dispatch or combine breaks the law, in words; empty if nowhere.

    ``max_spare_rows`` may stand behind the last block, where the size of the output is given.
    """
    experts = workload.placement.rank_to_experts[rank]
    # A first round, spoiled, so that the second cannot pass on what lies in recycled memory.
    rows, _, handle = shuffle.dispatch()
    shuffle.combine(rows, handle).fill_(torch.nan)
    rows.fill_(torch.nan)
    del rows

    rows, seen_counts, handle = shuffle.dispatch()
    counts = list(map(int, seen_counts))
    expected, expected_counts = expected_rows(world, experts)
    if counts != expected_counts:
        return [f"rank {rank}: counts {counts} instead of {expected_counts}"]
    if not 0 <= len(rows) - len(expected) <= max_spare_rows:
        return [f"rank {rank}: {len(rows)} dispatched rows instead of {len(expected)}"]
    wrong = (rows[: len(expected)] != expected).any(dim=1).nonzero().squeeze(1)
    errors = []
    if len(wrong):
        errors.append(
            f"rank {rank}: {len(wrong)} of {len(expected)} dispatched rows are wrong, first row {int(wrong[0])}"
        )
    y = torch.zeros_like(rows)
    y[: len(expected)] = apply_experts(rows[: len(expected)], counts, experts)
    error = combine_error(world, rank, shuffle.combine(y, handle), shuffle.num_roundings)
    if not error <= 1.0:
        errors.append(f"rank {rank}: combined rows are off by {error:.3g} times what rounding explains")
    return errors
