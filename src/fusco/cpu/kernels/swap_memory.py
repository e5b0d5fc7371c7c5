"""Two memories exchange their bytes, in one call that no signal handler divides."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import carray  # type: ignore[attr-defined]  # not in its list of exports

from fusco.core.compiled import compiled
from fusco.core.lanes import IntArray
from fusco.cpu.kernels.intrinsics import pointer_to


def swap_memory(first: torch.Tensor, second: torch.Tensor, num_swapped: IntArray) -> None:
    """Exchange the bytes of two tensors, uint8 (num_bytes,), and add their number to ``num_swapped``, int64 (1,).

    The tensors are contiguous, and do not overlap.

    >>> first, second, num_swapped = torch.tensor([1, 2]).byte(), torch.tensor([3, 4]).byte(), np.array([5])
    >>> swap_memory(first, second, num_swapped)
    >>> first.tolist(), second.tolist(), num_swapped.tolist()
    ([3, 4], [1, 2], [7])
    """
    assert len(first) == len(second), (len(first), len(second))
    _swap(first.data_ptr(), second.data_ptr(), len(first), num_swapped)


@compiled(nogil=True)
def _swap(first: int, second: int, num_bytes: int, num_swapped: Any) -> None:
    a, b = (carray(pointer_to(first), (num_bytes,), np.uint8), carray(pointer_to(second), (num_bytes,), np.uint8))
    for i in range(num_bytes):
        a[i], b[i] = b[i], a[i]
    num_swapped[0] += num_bytes
