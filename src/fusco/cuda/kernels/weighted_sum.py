"""The kernel ``weighted_sum``: gather rows and sum them with weights, for what benchmarks compare fusco with."""

from __future__ import annotations

import ctypes

import torch

from fusco.core.rows import accumulation_dtype, aligned
from fusco.cuda.kernels.abi import ELEMENT_TYPES, I64, POINTER, struct, vector_bytes
from fusco.cuda.kernels.library import Library
from fusco.cuda.tuning import WEIGHTED_SUM_THREADS as NUM_THREADS

_MAX_GRID = 1 << 20


# ``WeightedSumArgs`` of weighted_sum.cu.
WeightedSumArgs = struct("WeightedSumArgs", (POINTER, "rows row_idx weights out"), (I64, "num_rows num_tokens"))


def weighted_sum(
    library: Library, stream: int, rows: torch.Tensor, row_idx: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Launch on a stream handle; see ``weighted_sum_on_cpu`` of ``fusco.bench.shuffle.baseline``."""
    (num_tokens, num_topk), hidden = row_idx.shape, rows.shape[1]
    rows, weights = aligned(rows), weights.to(accumulation_dtype(rows.dtype)).contiguous()
    out = rows.new_empty(num_tokens, hidden)
    if not out.numel():
        return out
    assert (row_idx.dtype, row_idx.is_contiguous()) == (torch.int64, True), (row_idx.dtype, row_idx.stride())
    assert weights.shape == row_idx.shape, (weights.shape, row_idx.shape)
    arguments = WeightedSumArgs(
        rows=rows.data_ptr(),
        row_idx=row_idx.data_ptr(),
        weights=weights.data_ptr(),
        out=out.data_ptr(),
        num_rows=len(rows),
        num_tokens=num_tokens,
    )
    item_bytes = rows.element_size()
    constants = {
        "ARGUMENT_BYTES": ctypes.sizeof(arguments),
        "NUM_THREADS": NUM_THREADS,
        "HIDDEN": hidden,
        "NUM_TOPK": num_topk,
        "ROW_TYPE": ELEMENT_TYPES[rows.dtype],
        "VECTOR_ELEMENTS": vector_bytes(hidden * item_bytes) // item_bytes,
    }
    grid = min(num_tokens, _MAX_GRID)
    library.get("weighted_sum", constants).launch(arguments, stream, grid=grid, num_threads=NUM_THREADS)
    return out
