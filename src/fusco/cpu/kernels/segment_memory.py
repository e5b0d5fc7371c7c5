"""Scattered segments of memory, read and written as one memory of bytes: one ``memcpy`` for each segment."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fusco.core.compiled import compiled
from fusco.core.segments import Segments
from fusco.cpu.kernels.intrinsics import copy_memory


def concatenate(addresses: npt.NDArray[np.int64], num_bytes: npt.NDArray[np.int64], dst: torch.Tensor) -> None:
    """Copy segments of memory one after the other to ``dst``, contiguous and of their total size.

    ``addresses`` and ``num_bytes`` are int64 (num_segments,), of memory that this process may read.
    """
    assert dst.nbytes == num_bytes.sum(), (dst.nbytes, num_bytes)
    _concatenate(addresses, num_bytes, dst.data_ptr())


@dataclass(frozen=True, slots=True)
class ContiguousMemory:
    """Contiguous memory, with the copies of ``JoinedSegments``; ``address`` is that of its first byte."""

    address: int

    def read(self, first: int, num_bytes: int, target: int) -> None:
        """See ``JoinedSegments``."""
        ctypes.memmove(target, self.address + first, num_bytes)

    def write(self, first: int, num_bytes: int, source: int) -> None:
        """See ``JoinedSegments``."""
        ctypes.memmove(self.address + first, source, num_bytes)


class JoinedSegments:
    """Segments of several tensors as one memory of bytes, in their order."""

    def __init__(self, parts: Sequence[Segments]) -> None:
        self._parts = parts  # which keep their memory
        found = [part.descriptors for part in parts]
        offsets = [part.memory.data_ptr() + of.offset_bytes.numpy() for part, of in zip(parts, found, strict=True)]
        none = np.zeros(0, np.int64)
        self._addresses = np.concatenate([none, *offsets])
        self._ends = np.concatenate([none, *(of.num_bytes.numpy() for of in found)]).cumsum()

    def read(self, first: int, num_bytes: int, target: int) -> None:
        """Copy bytes from ``first`` on to an address."""
        _copy_stream(self._addresses, self._ends, first, num_bytes, target, 0)

    def write(self, first: int, num_bytes: int, source: int) -> None:
        """Copy bytes from an address to those from ``first`` on."""
        _copy_stream(self._addresses, self._ends, first, num_bytes, source, 1)


class JoinedPieces(JoinedSegments):
    """Contiguous tensors of bytes as one memory, in their order; a part of one is sent without a copy."""

    def __init__(self, pieces: Sequence[torch.Tensor]) -> None:
        self._pieces = pieces
        self._addresses = np.array([piece.data_ptr() for piece in pieces], dtype=np.int64)
        self._ends = np.array([len(piece) for piece in pieces], dtype=np.int64).cumsum()

    def view(self, first: int, num_bytes: int) -> torch.Tensor | None:
        """Return bytes from ``first`` on if one piece has all of them; else ``None``."""
        piece = int(np.searchsorted(self._ends, first, side="right"))
        end = first + num_bytes - int(self._ends[piece])  # counted from the end of the piece
        return None if end > 0 else self._pieces[piece][len(self._pieces[piece]) + end - num_bytes :][:num_bytes]


@compiled(nogil=True)
def _copy_stream(addresses: Any, ends: Any, first: int, num_bytes: int, buffer: int, is_written: int) -> None:
    segment = np.searchsorted(ends, first, side="right")
    while num_bytes > 0:
        size = min(num_bytes, ends[segment] - first)
        start = addresses[segment] + first - (ends[segment - 1] if segment else 0)
        if is_written:
            copy_memory(start, buffer, size)
        else:
            copy_memory(buffer, start, size)
        first, buffer, num_bytes, segment = first + size, buffer + size, num_bytes - size, segment + 1


@compiled(nogil=True)
def _concatenate(addresses: Any, num_bytes: Any, dst: int) -> None:
    for i in range(num_bytes.size):
        copy_memory(dst, addresses[i], num_bytes[i])
        dst += num_bytes[i]
