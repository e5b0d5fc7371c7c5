"""Compilation of all CPU kernels ahead of time."""

from __future__ import annotations

import torch

from fusco.core.rows import ROW_DTYPES, accumulation_dtype
from fusco.cpu.kernels.add_rows import add_rows
from fusco.cpu.kernels.copy_segments import copy_segments
from fusco.cpu.kernels.reduce_rows import reduce_rows


def warm_up_cpu() -> None:
    """Compile every kernel for every dtype, or load it from the disk cache (seconds once, then milliseconds)."""
    none = torch.zeros(0, dtype=torch.int64, device="cpu")
    memory = torch.zeros(0, dtype=torch.uint8, device="cpu")
    copy_segments(memory, none, memory, none, none)
    for dtype in ROW_DTYPES:
        sum_dtype = accumulation_dtype(dtype)
        rows, sums = torch.zeros(0, 1, dtype=dtype, device="cpu"), torch.zeros(0, 1, dtype=sum_dtype, device="cpu")
        first, weights = torch.zeros(1, dtype=torch.int64, device="cpu"), torch.zeros(0, dtype=sum_dtype, device="cpu")
        reduce_rows(rows, first, none, weights, sums)
        add_rows(rows, none, sums)
