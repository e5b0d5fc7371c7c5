"""Verification of a variant, before it is timed, by the specification (docs/design.md), computed slowly and directly.

Each expert multiplies its rows by a different factor, so a row at the wrong expert also changes the combined result.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fusco.bench.inputs.traffic import Workload, WorldInput
from fusco.bench.shuffle.factory import Shuffle


def verify(shuffle: Shuffle, workload: Workload, world: WorldInput, rank: int, max_spare_rows: int = 0) -> list[str]:
    """Describe where a rank's dispatch or combine differs from the specification; empty if nowhere.

    ``max_spare_rows`` may follow the last block, since static outputs have a given size.
    """
    experts = workload.placement.rank_to_experts[rank]
    # A first round, overwritten with NaN, so that the second cannot pass on old contents of recycled memory.
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
    seen = rows[: len(expected)]
    if not shuffle.is_ordered:
        seen, expected = (_in_order_of_content(part, counts) for part in (seen, expected))
    wrong = (seen != expected).any(dim=1).nonzero().squeeze(1)
    errors = []
    if num := len(wrong):
        errors.append(f"rank {rank}: {num} of {len(expected)} dispatched rows are wrong, first row {int(wrong[0])}")
    y = torch.zeros_like(rows)
    y[: len(expected)] = apply_experts(rows[: len(expected)], counts, experts)
    error = combine_error(world, rank, shuffle.combine(y, handle), shuffle.num_roundings)
    if not error <= 1.0:
        errors.append(f"rank {rank}: combined rows are off by {error:.3g} times what rounding explains")
    return errors


def _in_order_of_content(rows: torch.Tensor, counts: list[int]) -> torch.Tensor:
    """Sort the rows of each expert by a hash of their bytes, so that blocks of the same rows are equal."""
    factors = torch.randint(1, 1 << 30, rows.shape[1:], generator=torch.Generator().manual_seed(0), device="cpu")
    bits = rows.contiguous().view({2: torch.int16, 4: torch.int32}[rows.element_size()])
    hashes = torch.cat([(part.long() * factors.to(rows.device)).sum(1) for part in torch.split(bits, 1024)])
    experts = torch.arange(len(counts), device=rows.device).repeat_interleave(torch.tensor(counts, device=rows.device))
    by_hash = hashes.argsort(stable=True)
    return rows[by_hash[experts[by_hash].argsort(stable=True)]]


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
