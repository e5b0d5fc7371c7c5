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
