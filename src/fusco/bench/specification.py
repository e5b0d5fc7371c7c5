"""Specification of dispatch and combine (docs/design.md), computed slowly and directly.

To verify a variant, each expert multiplies its rows by a different factor, so a row at the wrong expert also changes
the combined result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fusco.bench.traffic import Workload


@dataclass(frozen=True)
class WorldInput:
    """The rows and the routing of all ranks."""

    rows: Sequence[torch.Tensor]
    topk_idx: Sequence[torch.Tensor]
    topk_weights: Sequence[torch.Tensor]

    @classmethod
    def of(cls, workload: Workload, device: torch.device | str = "cpu") -> WorldInput:
        """Rebuild the input of every rank."""
        ranks = range(workload.topology.world_size)
        routings = [workload.routing(rank) for rank in ranks]
        return cls(
            [workload.rows(rank, device) for rank in ranks],
            [routing.topk_idx.to(device) for routing in routings],
            [routing.topk_weights.to(device) for routing in routings if routing.topk_weights is not None],
        )


def world_bytes(workload: Workload) -> int:
    """Return the memory that the rows of a ``WorldInput`` take while they are made, the last rank's in float32."""
    num_elements = workload.tokens * workload.hidden
    return num_elements * (workload.topology.world_size * workload.dtype.itemsize + torch.float32.itemsize)


def expected_rows(world: WorldInput, experts: Sequence[int]) -> tuple[torch.Tensor, list[int]]:
    """Return a rank's expected rows, by expert, source rank and token, and the number of rows of each expert."""
    blocks = []
    for expert in experts:
        parts = [rows[(ids == expert).nonzero()[:, 0]] for rows, ids in zip(world.rows, world.topk_idx, strict=True)]
        blocks.append(torch.cat(parts))
    return torch.cat(blocks) if blocks else world.rows[0][:0], [len(block) for block in blocks]


def apply_experts(rows: torch.Tensor, num_rows_per_expert: Sequence[int], experts: Sequence[int]) -> torch.Tensor:
    """Multiply the rows of each expert by a factor of that expert, in place of a real one."""
    factors = torch.tensor([_factor(expert) for expert in experts], dtype=rows.dtype, device="cpu")
    by_row = factors.repeat_interleave(torch.tensor(num_rows_per_expert, dtype=torch.int64, device="cpu"))
    return rows * by_row.to(rows.device)[:, None]


def combine_error(world: WorldInput, rank: int, combined: torch.Tensor, num_roundings: int = 2) -> float:
    """Return the largest error of a rank's combined rows against float64, relative to what rounding may cost.

    Up to 1.0 is correct. A result in 16 bits may be rounded ``num_roundings`` times (at each node and at the end, or
    also at each rank), one in float32 at each addition. The cost of a rounding is relative to the sum of the absolute
    values of a token's terms.
    """
    rows, ids, weights = world.rows[rank], world.topk_idx[rank], world.topk_weights[rank]
    of_experts = [*map(_factor, range(int(ids.max()) + 1)), 0.0]
    factors = torch.tensor(of_experts, dtype=rows.dtype, device=rows.device)
    terms = (rows[:, None, :] * factors[ids][:, :, None]).double() * (weights * (ids >= 0)).double()[:, :, None]
    magnitude = terms.abs().sum(1)
    is_short = rows.dtype.itemsize == 2
    tolerance = torch.finfo(rows.dtype).eps * (num_roundings / 2 if is_short else ids.shape[1] + 2.0) * magnitude
    if not bool(torch.isfinite(combined).all()):
        return float("inf")
    units = (combined.double() - terms.sum(1)).abs() / tolerance.clamp_min(torch.finfo(torch.float64).tiny)
    return float(units.max()) if units.numel() else 0.0


def _factor(expert: int) -> float:
    return 1.0 + expert % 7 / 8  # exact in every floating dtype
