"""Configuration of ``fusco bench prefill``, and routing that replaces what the random routers choose.

Random weights route most tokens to few experts, and where two experts have nearly the same probability, a rounding
decides. With given experts all variants move the same rows; the weights of a token's experts remain the router's, which
depend continuously on the hidden states. So logits of variants differ by rounding alone.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import product
from typing import Literal

import numpy as np
import torch

from fusco.bench.harness.model_job import ModelJob
from fusco.bench.inputs.arrays import ROUTING, load_shipped
from fusco.bench.inputs.prompts import prompt_lengths

_SKEW = re.compile(r"skew(\d+(\.\d+)?)")
ROUTINGS = ("random", "trace")


def check_routing(routing: str, num_experts: int, num_topk: int) -> None:
    """Raise ``ValueError`` unless the routing exists for so many experts."""
    if routing not in ROUTINGS and not _SKEW.fullmatch(routing):
        raise ValueError(f"routing {routing!r} is not one of {', '.join(ROUTINGS)}, or a skew such as skew2")
    if routing == "trace" and (num_experts, num_topk) != (128, 8):
        raise ValueError(f"the trace has top-8 of 128 experts, not top-{num_topk} of {num_experts}: use random routing")


def make_routing(routing: str, shape: tuple[int, int, int, int], rank: int, num_ranks: int, seed: int) -> torch.Tensor:
    """Return the experts of a rank's tokens, int64 (num_layers, num_tokens, num_topk) on the CPU.

    ``shape`` is (num_layers, num_tokens, num_experts, num_topk). ``"random"``: different experts with equal
    probability, by ``seed``. ``"skew2"``: the same, but the first experts of rank 0, as few as possible, get twice the
    rows of the mean rank, or as many as the experts per token allow. ``"trace"``: those of Qwen3-30B-A3B, layer by
    layer, repeated as often as there are tokens; ranks begin at different tokens of the trace.
    """
    num_layers, num_tokens, num_experts, num_topk = shape
    if routing == "trace":
        ids = load_shipped(ROUTING)["topk_idx"]
        tokens = (np.arange(num_tokens) + rank * len(ids) // num_ranks) % len(ids)
        layers = np.arange(num_layers) % ids.shape[1]
        return torch.from_numpy(ids[tokens][:, layers].astype(np.int64)).transpose(0, 1).contiguous()
    generator = torch.Generator("cpu").manual_seed(seed * 65537 + rank)

    def draw(*sizes: int) -> torch.Tensor:
        return torch.rand(num_tokens, *sizes, generator=generator, dtype=torch.float32, device="cpu")

    scores = (draw(num_experts) for _ in range(num_layers))
    if matched := _SKEW.fullmatch(routing):
        per_rank = num_experts // num_ranks
        wanted = min(float(matched[1]) * num_topk / num_ranks, num_topk, per_rank)  # experts of rank 0, of each token

        def skewed(score: torch.Tensor) -> torch.Tensor:
            """Put as many of the first experts in front of all others, and the rest of rank 0 behind them."""
            number = int(wanted) + (draw(1) < wanted % 1)
            score[:, :per_rank] = torch.where(torch.arange(per_rank, device="cpu") < number, 2.0, -1.0)
            return score

        scores = (skewed(score) for score in scores)
    return torch.stack([score.topk(num_topk, dim=1).indices for score in scores])


def rows_per_rank(routing: torch.Tensor, num_experts: int, num_ranks: int) -> torch.Tensor:
    """Return the rows that this routing sends to each rank in each layer, int64 (num_layers, num_ranks)."""
    ranks = routing.flatten(1) // (num_experts // num_ranks)
    rows = torch.zeros(len(ranks), num_ranks, dtype=torch.int64, device=ranks.device)
    return rows.scatter_add_(1, ranks, torch.ones_like(ranks))


@dataclass(frozen=True, kw_only=True)
class PrefillJob(ModelJob):
    """A run: every batch with every routing, by every variant."""

    tokens: int  # most tokens of a rank in one prefill
    batches: tuple[str, ...]  # see ``prompt_lengths``
    routings: tuple[str, ...] = ROUTINGS  # names of ``ROUTINGS``
    dtype: Literal["float32", "bfloat16"]  # of weights and rows
    spare_places: int = 2  # of each rank, for the experts that "fusco-balanced" copies
    done: tuple[tuple[str, str], ...] = ()  # cases that are not run again: a routing and a batch

    def __post_init__(self) -> None:
        super().__post_init__()
        for routing in self.routings:
            check_routing(routing, self.shape.num_experts, self.shape.num_topk)
        for batch in self.batches:
            prompt_lengths(batch, self.tokens, self.num_ranks)

    @property
    def cases(self) -> list[tuple[str, str]]:
        """Routings and batches that are to run."""
        return [case for case in product(self.routings, self.batches) if case not in self.done]

    @property
    def parameter_bytes(self) -> int:
        """Bytes of a rank's parameters without norms: dense ones, and its experts."""
        return (4 if self.dtype == "float32" else 2) * self.shape.num_parameters(self.num_local_experts)
