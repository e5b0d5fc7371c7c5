"""Gather rows of a pool, one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numba import carray  # type: ignore[attr-defined]  # not in its list of exports

from fusco.core.compiled import compiled
from fusco.core.lanes import IntArray
from fusco.cpu.kernels.intrinsics import copy_memory, pointer_to


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


def gather_parts(parts: IntArray, groups: Sequence[torch.Tensor]) -> tuple[torch.Tensor, IntArray]:
    """Return groups of rows of several pools as bytes; in each group the rows of the first pool are first.

    ``parts`` is int64 (num_parts, 2), the address of each pool and the size of its rows; ``groups`` are the rows of
    each group, int64 (num_rows,), contiguous. Also returns the bounds of the groups, int64 (num_groups + 1,).
    """
    rows = np.array([(group.data_ptr(), len(group)) for group in groups], np.int64)
    bounds = np.zeros(len(groups) + 1, np.int64)
    rows[:, 1].cumsum(out=bounds[1:])
    bounds *= parts[:, 1].sum()
    dst = torch.from_numpy(np.empty(bounds[-1], np.uint8))
    _gather_parts(parts, rows, dst.data_ptr())
    return dst, bounds


@compiled(nogil=True)
def _gather_parts(parts: Any, groups: Any, dst: int) -> None:
    for i in range(len(groups)):
        rows = carray(pointer_to(groups[i, 0]), (groups[i, 1],), np.int64)
        for j in range(len(parts)):
            _gather_rows(parts[j, 0], rows, parts[j, 1], dst)
            dst += len(rows) * parts[j, 1]


@compiled(nogil=True)
def _gather_rows(pool: int, rows: Any, row_bytes: int, dst: int) -> None:
    for i in range(len(rows)):
        copy_memory(dst + i * row_bytes, pool + rows[i] * row_bytes, row_bytes)
