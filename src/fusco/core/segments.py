"""Segments: scattered contiguous pieces of memory, described by dense arrays of offsets and sizes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from fusco.core.rows import as_bytes, row_bytes, why_not_movable, why_nothing_moves_here


@dataclass(frozen=True)
class Descriptors:
    """Offsets and sizes of segments: int64 (num_segments,) each, on the CPU. Shared, so they must not be changed."""

    offset_bytes: torch.Tensor
    num_bytes: torch.Tensor

    @property
    def packed_offset_bytes(self) -> torch.Tensor:
        """Offsets of the segments when packed one after the other, int64 (num_segments,)."""
        return self.num_bytes.cumsum(0) - self.num_bytes

    @property
    def total_bytes(self) -> int:
        """Total bytes of all segments."""
        return int(self.num_bytes.sum())


class Segments:
    """A payload: segments of one tensor's memory, in the order in which their bytes are sent or received.

    ``base`` is a contiguous tensor of any dtype; segment ``i`` is ``num_bytes[i]`` bytes of its memory, from byte
    ``offset_bytes[i]`` on. Both arrays are int64, one-dimensional and on the CPU. They are copied, in and out,
    so later changes do not affect segments. Sizes may be unequal and zero. Segments to be written must not overlap.
    Source: FUSCO section 3.2.

    Raises ``TypeError`` or ``ValueError`` if these rules are broken, with the first segment that breaks them.

    >>> words = torch.arange(6, dtype=torch.uint8)
    >>> payload = Segments(words, torch.tensor([4, 0]), torch.tensor([2, 1]))
    >>> payload
    Segments(base=uint8[6], num_segments=2, total_bytes=3)
    >>> [(piece.offset_bytes.tolist(), piece.num_bytes.tolist()) for piece in payload.slices(2)]
    [([4], [2]), ([0], [1])]
    """

    __slots__ = ("_base", "_descriptors", "_memory")

    def __init__(self, base: torch.Tensor, offset_bytes: torch.Tensor, num_bytes: torch.Tensor) -> None:
        if why_not := why_nothing_moves_here():
            raise TypeError(f"Segments {why_not}")
        self._memory = _memory_of(base)
        for name, array in (("offset_bytes", offset_bytes), ("num_bytes", num_bytes)):
            _check_array(name, array)
        if len(offset_bytes) != len(num_bytes):
            raise ValueError(f"{len(offset_bytes)} offsets but {len(num_bytes)} sizes of segments")
        self._base = base
        self._descriptors = Descriptors(offset_bytes.clone(), num_bytes.clone())
        _check_inside(self._descriptors, len(self._memory))

    @classmethod
    def rows(cls, matrix: torch.Tensor, row_idx: torch.Tensor) -> Segments:
        """Return one segment for each of the rows ``row_idx`` (int64) of a contiguous matrix.

        Raises ``TypeError`` or ``ValueError``, for an index that is not a row with its value.
        """
        _memory_of(matrix)
        _check_array("row_idx", row_idx)
        if matrix.ndim < 1:
            raise ValueError("segments of rows need a base of at least one dimension, got a scalar")
        is_outside = (row_idx < 0) | (row_idx >= len(matrix))  # checked here, as an offset in bytes could overflow
        if bool(is_outside.any()):
            i = int(is_outside.nonzero()[0])
            raise ValueError(f"row_idx[{i}] = {int(row_idx[i])} is not a row of a base of {len(matrix)}")
        size = row_bytes(matrix)
        return cls(matrix, row_idx * size, torch.full_like(row_idx, size))

    @property
    def base(self) -> torch.Tensor:
        """The tensor whose memory contains the segments."""
        return self._base

    @property
    def offset_bytes(self) -> torch.Tensor:
        """A copy of the offsets in bytes, int64 (num_segments,)."""
        return self._descriptors.offset_bytes.clone()

    @property
    def num_bytes(self) -> torch.Tensor:
        """A copy of the sizes in bytes, int64 (num_segments,)."""
        return self._descriptors.num_bytes.clone()

    @property
    def descriptors(self) -> Descriptors:
        """Both arrays, not copied, for the code that moves the bytes."""
        return self._descriptors

    @property
    def total_bytes(self) -> int:
        """Total bytes of all segments."""
        return self._descriptors.total_bytes

    @property
    def memory(self) -> torch.Tensor:
        """The base tensor's memory as bytes, uint8 (num_bytes,)."""
        return self._memory

    def slices(self, slice_bytes: int) -> Iterator[Descriptors]:
        """Cut the byte stream into slices of ``slice_bytes``, the last one shorter; segments may be cut, too.

        The beginning of a slice follows from the bytes before it, as descriptors are in stream order.
        """
        offsets, sizes = self._descriptors.offset_bytes, self._descriptors.num_bytes
        ends = sizes.cumsum(0)
        total = self.total_bytes
        slice_begin = torch.arange(0, total, slice_bytes, device="cpu")
        slice_end = (slice_begin + slice_bytes).clamp(max=total)
        first = torch.searchsorted(ends, slice_begin, right=True)
        num_segments = torch.searchsorted(ends, slice_end) + 1 - first
        # All slices at once, as a PyTorch call takes as long for one slice as for all.
        before = num_segments.cumsum(0) - num_segments
        index = torch.arange(int(num_segments.sum()), device="cpu") + (first - before).repeat_interleave(num_segments)
        segment_begin = (ends - sizes)[index]
        begin = torch.maximum(segment_begin, slice_begin.repeat_interleave(num_segments))
        offset_bytes = offsets[index] + begin - segment_begin
        num_bytes = torch.minimum(ends[index], slice_end.repeat_interleave(num_segments)) - begin
        counts = num_segments.tolist()
        for offset, size in zip(offset_bytes.split_with_sizes(counts), num_bytes.split_with_sizes(counts), strict=True):
            yield Descriptors(offset, size)

    def __repr__(self) -> str:
        dtype, num_segments = str(self._base.dtype).removeprefix("torch."), len(self._descriptors.num_bytes)
        what = f"base={dtype}{list(self._base.shape)}, num_segments={num_segments}, total_bytes={self.total_bytes}"
        return f"Segments({what})"


def _memory_of(base: torch.Tensor) -> torch.Tensor:
    if not isinstance(base, torch.Tensor):
        raise TypeError(f"segments need a tensor as their base, got {type(base).__name__}")
    if why_not := why_not_movable(base):
        raise TypeError(f"segments need memory, but their base {why_not}")
    if base.is_conj() or base.is_neg():
        raise ValueError(
            "segments need a base whose memory holds its values, but it is conjugated or negated when read; pass "
            "base.resolve_conj().resolve_neg()"
        )
    if not base.is_contiguous():
        raise ValueError(f"segments need a contiguous base tensor, got strides {base.stride()}")
    return as_bytes(base)


def _check_array(name: str, array: torch.Tensor) -> None:
    if not isinstance(array, torch.Tensor):
        raise TypeError(f"{name} must be a one-dimensional int64 tensor, got {type(array).__name__}")
    if why_not := why_not_movable(array):
        raise TypeError(f"{name} must be a one-dimensional int64 tensor, but it {why_not}")
    if array.dtype != torch.int64 or array.ndim != 1 or array.device.type != "cpu":
        raise TypeError(
            f"{name} must be a one-dimensional int64 tensor on the CPU, got {array.dtype} of shape "
            f"{tuple(array.shape)} on {array.device}"
        )


def _check_inside(descriptors: Descriptors, room: int) -> None:
    offset, size = descriptors.offset_bytes, descriptors.num_bytes
    # Compare without a sum, which could overflow.
    is_outside = (offset < 0) | (size < 0) | (size > room)
    is_outside |= offset > room - size.clamp(max=room)
    if bool(is_outside.any()):
        i = int(is_outside.nonzero()[0])
        raise ValueError(
            f"segment {i} (offset {int(offset[i])}, {int(size[i])} bytes) lies outside its base tensor of {room} bytes"
        )
