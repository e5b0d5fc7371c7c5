"""Add dense rows into scattered sums: combines the partial sums of several ranks."""

from __future__ import annotations

from typing import Any

import torch

from fusco.core.compiled import compiled
from fusco.cpu.kernels.intrinsics import widen
from fusco.cpu.kernels.reduce_rows import as_array


def add_rows(rows: torch.Tensor, row_to_sum: torch.Tensor, sums: torch.Tensor) -> None:
    """Add ``rows[i]`` to ``sums[row_to_sum[i]]`` for every ``i``.

    Args:
        rows: bfloat16, float16, float32 or float64 (num_rows, hidden), contiguous.
        row_to_sum: int64 (num_rows,), no index twice.
        sums: float32 or float64 (num_sums, hidden), contiguous; changed in place.

    >>> sums = torch.ones(3, 1)
    >>> add_rows(torch.tensor([[1.0], [2.0]]), torch.tensor([2, 0]), sums)
    >>> sums.tolist()
    [[3.0], [1.0], [2.0]]
    """
    _add_rows(as_array(rows), row_to_sum.numpy(), sums.numpy())


@compiled(nogil=True)
def add_row(row: Any, total: Any) -> None:
    """Add a row to a sum, for compiled code; see ``add_rows``."""
    for h in range(total.size):
        total[h] += widen(row[h])


@compiled(nogil=True)
def _add_rows(rows: Any, row_to_sum: Any, sums: Any) -> None:
    for i in range(row_to_sum.size):
        add_row(rows[i], sums[row_to_sum[i]])
