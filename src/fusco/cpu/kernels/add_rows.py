"""Add dense rows into scattered sums: how partial sums of several ranks come together."""

from __future__ import annotations

import torch

from fusco.cpu.kernels.add_rows_loop import add_rows as add_rows_cpu
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
    add_rows_cpu(as_array(rows), row_to_sum.numpy(), sums.numpy())
