"""Segments: scattered contiguous pieces of memory, and the dense descriptor arrays that name them."""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Segments:
    """A payload: segments of one tensor's memory, in the order in which their bytes are sent or received.

    ``base`` is a contiguous tensor of any dtype; segment ``i`` is the ``num_bytes[i]`` bytes from byte
    ``offset_bytes[i]`` of its memory on. Both arrays are int64, one-dimensional, on the CPU. Sizes may be unequal
    and zero. Segments to be written must not overlap. Source: FUSCO section 3.2.

    Raises ``TypeError`` or ``ValueError`` where these rules are broken, with the first segment that breaks them.

    >>> words = torch.arange(6, dtype=torch.uint8)
    >>> payload = Segments(words, torch.tensor([4, 0]), torch.tensor([2, 1]))
    >>> payload.total_bytes
    3
    >>> [(piece.offset_bytes.tolist(), piece.num_bytes.tolist()) for piece in payload.slices(2)]
    [([4], [2]), ([0], [1])]
    """

    base: torch.Tensor
    offset_bytes: torch.Tensor
    num_bytes: torch.Tensor

    def __post_init__(self) -> None:
        if not isinstance(self.base, torch.Tensor):
            raise TypeError(f"segments need a tensor as their base, got {type(self.base).__name__}")
        if not self.base.is_contiguous():
            raise ValueError(f"segments need a contiguous base tensor, got strides {self.base.stride()}")
        for name, array in (("offset_bytes", self.offset_bytes), ("num_bytes", self.num_bytes)):
            if not isinstance(array, torch.Tensor):
                raise TypeError(f"{name} must be a one-dimensional int64 tensor, got {type(array).__name__}")
            if array.dtype != torch.int64 or array.ndim != 1 or array.device.type != "cpu":
                raise TypeError(
                    f"{name} must be a one-dimensional int64 tensor on the CPU, got {array.dtype} of shape "
                    f"{tuple(array.shape)} on {array.device}"
                )
        if len(self.offset_bytes) != len(self.num_bytes):
            raise ValueError(f"{len(self.offset_bytes)} offsets but {len(self.num_bytes)} sizes of segments")
        room = self.base.numel() * self.base.element_size()
        # Compared without a sum, which could overflow.
        is_outside = (self.offset_bytes < 0) | (self.num_bytes < 0) | (self.num_bytes > room)
        is_outside |= self.offset_bytes > room - self.num_bytes.clamp(max=room)
        if bool(is_outside.any()):
            i = int(is_outside.nonzero()[0])
            raise ValueError(
                f"segment {i} (offset {int(self.offset_bytes[i])}, {int(self.num_bytes[i])} bytes) lies outside "
                f"its base tensor of {room} bytes"
            )

    @classmethod
    def rows(cls, matrix: torch.Tensor, row_idx: torch.Tensor) -> Segments:
        """The rows ``row_idx`` (int64) of a contiguous matrix, each one segment."""
        row_bytes = matrix[0].numel() * matrix.element_size() if len(matrix) else 0
        return cls(matrix, row_idx * row_bytes, torch.full_like(row_idx, row_bytes))

    @property
    def total_bytes(self) -> int:
        """Number of bytes of all segments together."""
        return int(self.num_bytes.sum())

    @property
    def memory(self) -> torch.Tensor:
        """The base tensor's memory as bytes, uint8 (num_bytes,)."""
        return self.base.detach().view(-1).view(torch.uint8)

    def slices(self, slice_bytes: int) -> Iterator[Segments]:
        """Cut the byte stream into slices of ``slice_bytes``, the last one shorter; segments may be cut too.

        Where a slice begins follows from the bytes before it, as descriptors stand in the order of the stream.
        """
        ends = self.num_bytes.cumsum(0)
        total = self.total_bytes
        slice_begin = torch.arange(0, total, slice_bytes, device="cpu")
        slice_end = (slice_begin + slice_bytes).clamp(max=total)
        first = torch.searchsorted(ends, slice_begin, right=True)
        num_segments = torch.searchsorted(ends, slice_end) + 1 - first
        # All slices at once, one behind the other, since a call of PyTorch's takes as long for one as for all.
        before = num_segments.cumsum(0) - num_segments
        index = torch.arange(int(num_segments.sum()), device="cpu") + (first - before).repeat_interleave(num_segments)
        segment_begin = (ends - self.num_bytes)[index]
        begin = torch.maximum(segment_begin, slice_begin.repeat_interleave(num_segments))
        offset_bytes = self.offset_bytes[index] + begin - segment_begin
        num_bytes = torch.minimum(ends[index], slice_end.repeat_interleave(num_segments)) - begin
        counts = num_segments.tolist()
        for offset, size in zip(offset_bytes.split_with_sizes(counts), num_bytes.split_with_sizes(counts), strict=True):
            yield self._part(offset, size)

    def _part(self, offset_bytes: torch.Tensor, num_bytes: torch.Tensor) -> Segments:
        """Pieces of these segments, which need not be checked again."""
        part = copy(self)
        vars(part).update(offset_bytes=offset_bytes, num_bytes=num_bytes)
        return part
