"""The experts of a rank as bytes: the places of its tensors."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from fusco.core.lanes import IntArray
from fusco.core.rows import as_bytes, count_as_changed, describe_rows, row_bytes

_LONGEST_TEXT = 300  # of the tensors in a fingerprint, whose room is limited


def describe_experts(tensors: Sequence[torch.Tensor]) -> str:
    """Return dtypes and shapes of the weights of one expert, as text; many of them as their number and a hash.

    >>> describe_experts([torch.empty(4, 3, 2), torch.empty(4, dtype=torch.uint8)])
    'float32[3, 2], uint8[]'
    """
    text = ", ".join(map(describe_rows, tensors))
    return text if len(text) <= _LONGEST_TEXT else f"{len(tensors)} tensors ({_digest(text.encode())})"


def describe_places(places: IntArray) -> str:
    """Return a text that differs between placements: ranks, places of each, a hash."""
    num_ranks, num_places = places.shape
    return f"{num_ranks} x {num_places} places ({_digest(places.tobytes())})"


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=6).hexdigest()


class ExpertMemory:
    """The places of a rank: tensors (P, ...), whose rows ``[i]`` are together the bytes of the expert in place ``i``.

    A row is contiguous; rows need not follow each other.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = tuple(tensors)
        ends = np.cumsum([row_bytes(tensor) for tensor in tensors], dtype=np.int64)
        self._spans = list(zip([0, *ends[:-1].tolist()], ends.tolist(), strict=False))
        self.bytes_per_expert = int(ends[-1]) if len(ends) else 0

    def pieces(self, place: int, begin: int, end: int) -> Iterator[torch.Tensor]:
        """Yield views of bytes ``begin`` to ``end`` of the expert in a place, in order, uint8."""
        for tensor, (first, last) in zip(self.tensors, self._spans, strict=True):
            if begin < last and first < end:
                yield as_bytes(tensor[place])[max(begin - first, 0) : end - first]

    def write(self, place: int, pieces: Sequence[torch.Tensor], begin: int = 0) -> None:
        """Write the bytes of an expert, in order, to a place; from byte ``begin`` on."""
        first = 0
        for piece in pieces:
            rest, end = piece[max(begin - first, 0) :], first + len(piece)
            for target in self.pieces(place, max(begin, first), end):
                target.copy_(rest[: len(target)])
                rest = rest[len(target) :]
            first = end

    def count_as_changed(self) -> None:
        """Count a change in place of all tensors."""
        for tensor in self.tensors:
            count_as_changed(tensor)
