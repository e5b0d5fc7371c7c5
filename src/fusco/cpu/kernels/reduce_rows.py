"""Weighted sums of scattered rows: the arithmetic of combine."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import torch

from fusco.core.compiled import compiled
from fusco.cpu.kernels.intrinsics import widen

_BITS_OF_HALVES = {torch.bfloat16: torch.uint16, torch.float16: torch.int16}


def as_array(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """Return a tensor's memory as a NumPy array; 16-bit floats as integers of their bits (see ``intrinsics``)."""
    bits = _BITS_OF_HALVES.get(tensor.dtype)
    return tensor.numpy() if bits is None else tensor.view(bits).numpy()


def reduce_rows(
    rows: torch.Tensor,
    row_to_first_term: torch.Tensor,
    term_to_row: torch.Tensor,
    term_weight: torch.Tensor,
    sums: torch.Tensor,
) -> None:
    """Set ``sums[i]`` to the sum of ``term_weight[j] * rows[term_to_row[j]]`` over its terms ``j``, in order.

    Products and sums are rounded separately in the dtype of ``sums``, so the result is the same on every run.

    Args:
        rows: bfloat16, float16, float32 or float64 (num_rows, hidden), contiguous.
        row_to_first_term: int64 (num_sums + 1,); sum ``i`` has terms ``row_to_first_term[i]`` to ``[i + 1]``.
        term_to_row: int64 (num_terms,).
        term_weight: (num_terms,), of the dtype of ``sums``.
        sums: ``accumulation_dtype(rows.dtype)`` (num_sums, hidden), contiguous; overwritten.

    >>> sums = torch.empty(2, 1)
    >>> rows = torch.tensor([[1.0], [10.0], [100.0]])
    >>> reduce_rows(rows, torch.tensor([0, 2, 3]), torch.tensor([2, 0, 1]), torch.tensor([1.0, 2.0, 3.0]), sums)
    >>> sums.tolist()
    [[102.0], [30.0]]
    """
    _reduce_rows(as_array(rows), row_to_first_term.numpy(), term_to_row.numpy(), term_weight.numpy(), sums.numpy())


# A row of sums stays in the cache while its terms stream by, two at a time. Two terms a pass halve the traffic between
# cache and registers; four gave no more.
@compiled(nogil=True, error_model="numpy")
def reduce_row(rows: Any, term: int, end: int, term_to_row: Any, term_weight: Any, total: Any) -> None:
    """Set ``total`` to the sum of terms ``term`` to ``end``, for compiled code; see ``reduce_rows``."""
    width = total.size
    total[:] = 0
    while term + 1 < end:
        weight, next_weight = term_weight[term], term_weight[term + 1]
        row, next_row = rows[term_to_row[term]], rows[term_to_row[term + 1]]
        for h in range(width):
            # Summed from left to right, as one at a time would be.
            total[h] = (total[h] + weight * widen(row[h])) + next_weight * widen(next_row[h])
        term += 2
    if term < end:
        weight, row = term_weight[term], rows[term_to_row[term]]
        for h in range(width):
            total[h] += weight * widen(row[h])


@compiled(nogil=True, error_model="numpy")
def _reduce_rows(rows: Any, row_to_first_term: Any, term_to_row: Any, term_weight: Any, sums: Any) -> None:
    for i in range(sums.shape[0]):
        reduce_row(rows, row_to_first_term[i], row_to_first_term[i + 1], term_to_row, term_weight, sums[i])
