"""Rows of sums in the form in which they travel: written by the holder, added by the token's rank."""

from __future__ import annotations

import torch

from fusco.core.wire import Wire
from fusco.cpu.kernels.add_quantized_rows import add_quantized_rows
from fusco.cpu.kernels.add_rows import add_rows
from fusco.cpu.kernels.quantize_rows import quantize_rows


def write_sums(sums: torch.Tensor, wire: Wire, rows: torch.Tensor) -> None:
    """Write sums (num_rows, hidden) as accumulated to rows (num_rows, width) of the wire."""
    if wire.quantize is None:
        rows.copy_(sums)
        return
    hidden = sums.shape[1]
    quantize_rows(sums, wire.quantize, rows[:, :hidden], rows[:, hidden:])


def add_sums(rows: torch.Tensor, wire: Wire, row_to_sum: torch.Tensor, sums: torch.Tensor) -> None:
    """Add rows (num_rows, width) of the wire to ``sums[row_to_sum]``, in place."""
    if wire.quantize is None:
        add_rows(rows, row_to_sum, sums)
    else:
        add_quantized_rows(rows.data_ptr(), wire.quantize, row_to_sum, sums)
