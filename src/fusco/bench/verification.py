"""Comparison of a variant with the specification, made before it is timed."""

from __future__ import annotations

import torch

from fusco.bench.specification import WorldInput, apply_experts, combine_error, expected_rows
from fusco.bench.traffic import Workload
from fusco.bench.variants import Shuffle


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


def _in_order_of_content(rows: torch.Tensor, counts: list[int]) -> torch.Tensor:
    """Sort the rows of each expert by a hash of their bytes, so that blocks of the same rows are equal."""
    factors = torch.randint(1, 1 << 30, rows.shape[1:], generator=torch.Generator().manual_seed(0), device="cpu")
    bits = rows.contiguous().view({2: torch.int16, 4: torch.int32}[rows.element_size()])
    hashes = torch.cat([(part.long() * factors.to(rows.device)).sum(1) for part in torch.split(bits, 1024)])
    experts = torch.arange(len(counts), device=rows.device).repeat_interleave(torch.tensor(counts, device=rows.device))
    by_hash = hashes.argsort(stable=True)
    return rows[by_hash[experts[by_hash].argsort(stable=True)]]
