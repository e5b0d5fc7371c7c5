"""The kernel ``weight_gradients``: combine's backward, gradient rows times their weights, and dot products."""

from __future__ import annotations

import ctypes

import torch

from fusco.core.rows import aligned
from fusco.cuda.kernels.abi import ELEMENT_TYPES, I64, POINTER, address, struct, vector_bytes
from fusco.cuda.kernels.library import Library, library_of
from fusco.cuda.tuning import WEIGHT_GRADIENTS_BLOCKS_PER_SM as BLOCKS_PER_SM, WEIGHT_GRADIENTS_THREADS as NUM_THREADS

_ROWS_PER_BLOCK = NUM_THREADS // 32


# ``WeightArgs`` of weight_gradients.cu.
WeightArgs = struct("WeightArgs", (POINTER, "grads rows weights dots"), (I64, "num_rows"))


def weight_gradients_on_cuda(
    grads: torch.Tensor, rows: torch.Tensor | None, weights: torch.Tensor
) -> torch.Tensor | None:
    """See ``fusco.api.autograd.weight_gradients``."""
    with torch.cuda.device(grads.device):
        stream = torch.cuda.current_stream().cuda_stream
        return launch(library_of(grads.device), stream, grads, rows, weights)


def launch(
    library: Library, stream: int, grads: torch.Tensor, rows: torch.Tensor | None, weights: torch.Tensor
) -> torch.Tensor | None:
    """Launch on a stream handle, with a given library; see ``weight_gradients_on_cuda``."""
    (num_rows, hidden), item_bytes = grads.shape, grads.element_size()
    dots = None
    if rows is not None:
        dots = grads.new_empty(num_rows, dtype=torch.promote_types(grads.dtype, torch.float32))
        rows = aligned(rows)
    if not grads.numel():
        return None if dots is None else dots.zero_()
    assert grads.is_contiguous(), grads.stride()
    assert grads.data_ptr() % 16 == 0, grads.data_ptr()
    assert weights.is_contiguous(), weights.stride()
    assert rows is None or (rows.dtype, rows.shape) == (grads.dtype, grads.shape), (rows.dtype, rows.shape)
    arguments = WeightArgs(
        grads=grads.data_ptr(), rows=address(rows), weights=weights.data_ptr(), dots=address(dots), num_rows=num_rows
    )
    constants = {
        "ARGUMENT_BYTES": ctypes.sizeof(arguments),
        "NUM_THREADS": NUM_THREADS,
        "HIDDEN": hidden,
        "ROW_TYPE": ELEMENT_TYPES[grads.dtype],
        "WEIGHT_BYTES": weights.element_size(),
        "HAS_DOTS": int(dots is not None),
        "VECTOR_ELEMENTS": vector_bytes(hidden * item_bytes) // item_bytes,
    }
    grid = min(-(-num_rows // _ROWS_PER_BLOCK), library.num_sms * BLOCKS_PER_SM)
    library.get("weight_gradients", constants).launch(arguments, stream, grid=grid, num_threads=NUM_THREADS)
    return dots
