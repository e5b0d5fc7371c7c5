"""Weighted sums of rows that stand in scattered places: combine's arithmetic."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import torch

from fusco.cpu.kernels.reduce_rows_loop import reduce_rows as reduce_rows_cpu

_BITS_OF_HALVES = {torch.bfloat16: torch.uint16, torch.float16: torch.int16}


def as_array(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """A tensor's memory as NumPy array; 16-bit floats as integers of their bits (see ``cpu.intrinsics``)."""
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
    reduce_rows_cpu(as_array(rows), row_to_first_term.numpy(), term_to_row.numpy(), term_weight.numpy(), sums.numpy())
