"""Copy scattered segments of memory to scattered places: one ``memcpy`` for each segment."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fusco.core.compiled import compiled
from fusco.cpu.kernels.intrinsics import copy_bytes, copy_memory


def copy_segments(
    src: torch.Tensor, src_offset: torch.Tensor, dst: torch.Tensor, dst_offset: torch.Tensor, num_bytes: torch.Tensor
) -> None:
    """Copy ``src[src_offset[i]:][:num_bytes[i]]`` to ``dst[dst_offset[i]:][:num_bytes[i]]`` for every ``i``, in order.

    To copy a segment to several places, name it several times in a row. It is then read from memory once and from the
    cache afterwards.

    Args:
        src: uint8 (num_src_bytes,), the memory to read.
        src_offset: int64 (num_segments,), in bytes.
        dst: uint8 (num_dst_bytes,), the memory to write; must not overlap what is read.
        dst_offset: int64 (num_segments,), in bytes.
        num_bytes: int64 (num_segments,).

    Offsets are not checked. Callers build them from plans or from checked ``Segments``.

    >>> dst = torch.zeros(6, dtype=torch.uint8)
    >>> two = torch.tensor([2, 2, 1])
    >>> copy_segments(torch.arange(5, dtype=torch.uint8), torch.tensor([3, 3, 0]), dst, torch.tensor([0, 4, 2]), two)
    >>> dst.tolist()
    [3, 4, 0, 0, 3, 4]
    """
    _copy_segments(src.numpy(), src_offset.numpy(), dst.numpy(), dst_offset.numpy(), num_bytes.numpy())


def concatenate(addresses: npt.NDArray[np.int64], num_bytes: npt.NDArray[np.int64], dst: torch.Tensor) -> None:
    """Copy segments of memory one after the other to ``dst``, contiguous and of their total size.

    ``addresses`` and ``num_bytes`` are int64 (num_segments,), of memory that this process may read.
    """
    assert dst.nbytes == num_bytes.sum(), (dst.nbytes, num_bytes)
    _concatenate(addresses, num_bytes, dst.data_ptr())


@compiled(nogil=True)
def _concatenate(addresses: Any, num_bytes: Any, dst: int) -> None:
    for i in range(num_bytes.size):
        copy_memory(dst, addresses[i], num_bytes[i])
        dst += num_bytes[i]


@compiled(nogil=True)
def _copy_segments(src: Any, src_offset: Any, dst: Any, dst_offset: Any, num_bytes: Any) -> None:
    for i in range(num_bytes.size):
        copy_bytes(dst, dst_offset[i], src, src_offset[i], num_bytes[i])
