"""Backward of combine: gradients of rows times their weights, and dot products, the gradients of these weights."""

from __future__ import annotations

import torch

from fusco.cuda.kernels.weight_gradients import weight_gradients_on_cuda

_ROWS_AT_ONCE = 512  # on the CPU: few enough for a cache, many enough for a PyTorch call


def weight_gradients(grads: torch.Tensor, rows: torch.Tensor | None, weights: torch.Tensor) -> torch.Tensor | None:
    """Return the dot product of ``grads[i]`` and ``rows[i]``, then multiply ``grads[i]`` by ``weights[i]``, in place.

    Products are rounded from float32, or from float64 if rows or weights are float64. No temporary is as large as the
    rows: widening 16-bit rows all at once would take twice their memory, each time.

    Args:
        grads: float16, bfloat16, float32 or float64 (num_rows, hidden), contiguous.
        rows: of the same dtype and shape, or ``None`` for no dot products.
        weights: float32 or float64 (num_rows,), contiguous.

    Returns:
        The dot products, float32 (num_rows,), float64 for float64 rows; ``None`` without rows.

    On CUDA this launches one kernel on the current stream; the host does not wait.

    >>> grads = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    >>> weight_gradients(grads, torch.tensor([[1.0, 1.0], [0.0, 2.0]]), torch.tensor([10.0, 0.5]))
    tensor([3., 8.])
    >>> grads
    tensor([[10.0000, 20.0000],
            [ 1.5000,  2.0000]])
    """
    if grads.is_cuda:
        return weight_gradients_on_cuda(grads, rows, weights)
    dots = None if rows is None else rows.new_empty(len(rows), dtype=torch.promote_types(rows.dtype, torch.float32))
    for first in range(0, len(grads), _ROWS_AT_ONCE):
        run = slice(first, first + _ROWS_AT_ONCE)
        if rows is not None and dots is not None:
            dots[run] = torch.linalg.vecdot(grads[run].to(dots.dtype), rows[run].to(dots.dtype))
        grads[run].mul_(weights[run, None])  # weights are not rounded to 16 bits first
    return dots
