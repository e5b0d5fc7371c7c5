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


# A row of sums stays in the cache while its terms stream by, two at a time. Two terms a pass halve the traffic between
# cache and registers; four gave no more.
@compiled(nogil=True, error_model="numpy")
def reduce_row(rows: Any, term: int, end: int, term_to_row: Any, term_weight: Any, total: Any) -> None:
    """Set ``total`` to the sum of ``term_weight[j] * rows[term_to_row[j]]``, ``j`` from ``term`` to ``end``, in order.

    Products and sums are rounded separately in the dtype of ``total``, so the result is the same on every run.
    """
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
