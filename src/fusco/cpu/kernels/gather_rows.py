"""Gather rows of a pool, one after the other."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fusco.core.compiled import compiled
from fusco.core.lanes import IntArray
from fusco.cpu.kernels.intrinsics import copy_memory


def gather_rows(pool: int, rows: IntArray, row_bytes: int, dst: torch.Tensor) -> None:
    """Copy some rows of a pool to the first bytes of ``dst``, in order.

    Args:
        pool: address of its first row.
        rows: int64 (num_rows,), contiguous; indices, which are not checked.
        row_bytes: size of a row.
        dst: uint8, of at least that many bytes.
    """
    assert len(rows) * row_bytes <= dst.nbytes, (len(rows), row_bytes, dst.nbytes)
    _gather_rows(pool, rows, row_bytes, dst.data_ptr())


def gather_parts(parts: IntArray, rows: IntArray) -> npt.NDArray[np.uint8]:
    """Return some rows of several pools as bytes, those of the first pool first.

    ``parts`` is int64 (num_parts, 2), the address of each pool and the size of its rows; see ``gather_rows`` for
    ``rows``.
    """
    dst = np.empty(len(rows) * parts[:, 1].sum(), np.uint8)
    _gather_parts(parts, rows, dst.ctypes.data)
    return dst


@compiled(nogil=True)
def _gather_parts(parts: Any, rows: Any, dst: int) -> None:
    for i in range(len(parts)):
        _gather_rows(parts[i, 0], rows, parts[i, 1], dst)
        dst += len(rows) * parts[i, 1]


@compiled(nogil=True)
def _gather_rows(pool: int, rows: Any, row_bytes: int, dst: int) -> None:
    for i in range(len(rows)):
        copy_memory(dst + i * row_bytes, pool + rows[i] * row_bytes, row_bytes)
