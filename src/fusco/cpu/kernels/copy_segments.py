"""Copy scattered segments of memory to scattered places: the data movement of gather, scatter and distribution."""

from __future__ import annotations

import torch

from fusco.cpu.kernels.copy_segments_loop import copy_segments as copy_segments_cpu


def copy_segments(
    src: torch.Tensor, src_offset: torch.Tensor, dst: torch.Tensor, dst_offset: torch.Tensor, num_bytes: torch.Tensor
) -> None:
    """Copy ``src[src_offset[i]:][:num_bytes[i]]`` to ``dst[dst_offset[i]:][:num_bytes[i]]`` for every ``i``, in order.

    A segment that goes to several places is named several times in a row; it is read from memory once and from the
    cache afterwards.

    Args:
        src: uint8 (num_src_bytes,), the memory to read.
        src_offset: int64 (num_segments,), in bytes.
        dst: uint8 (num_dst_bytes,), the memory to write; must not overlap what is read.
        dst_offset: int64 (num_segments,), in bytes.
        num_bytes: int64 (num_segments,).

    Offsets are not checked; callers build them from plans or from checked ``Segments``.

    >>> dst = torch.zeros(6, dtype=torch.uint8)
    >>> two = torch.tensor([2, 2, 1])
    >>> copy_segments(torch.arange(5, dtype=torch.uint8), torch.tensor([3, 3, 0]), dst, torch.tensor([0, 4, 2]), two)
    >>> dst.tolist()
    [3, 4, 0, 0, 3, 4]

    """
    copy_segments_cpu(src.numpy(), src_offset.numpy(), dst.numpy(), dst_offset.numpy(), num_bytes.numpy())
