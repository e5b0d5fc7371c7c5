"""Segments of memory are read and written in their order."""

import numpy as np
import torch

from fusco import Segments
from fusco.cpu.kernels.segment_memory import JoinedPieces, JoinedSegments, concatenate


def test_memories_are_concatenated():
    parts = [torch.arange(n, dtype=torch.int32) + 10 * n for n in (2, 0, 3)]
    together = torch.empty(5, dtype=torch.int32)
    addresses, sizes = np.array([part.data_ptr() for part in parts]), np.array([part.nbytes for part in parts])
    concatenate(addresses, sizes, together)
    assert together.tolist() == [20, 21, 30, 31, 32]


def test_segments_as_one_memory():
    base, other = torch.arange(10, dtype=torch.uint8), torch.arange(100, 104, dtype=torch.uint8)
    parts = [
        Segments(base, torch.tensor([7, 0, 3]), torch.tensor([2, 0, 4])),  # 7 8, nothing, 3 4 5 6
        Segments(other, torch.tensor([1]), torch.tensor([2])),
    ]
    memory, found = JoinedSegments(parts), torch.full((8,), 255, dtype=torch.uint8)
    for first in range(9):
        for end in range(first, 9):
            found.fill_(255)
            memory.read(first, end - first, found.data_ptr())
            assert found.tolist() == [7, 8, 3, 4, 5, 6, 101, 102][first:end] + [255] * (8 - end + first)
    new = torch.arange(50, 56, dtype=torch.uint8)
    memory.write(1, 6, new.data_ptr())
    assert base.tolist() == [0, 1, 2, 51, 52, 53, 54, 7, 50, 9]
    assert other.tolist() == [100, 55, 102, 103]


def test_pieces_as_one_memory():
    pieces = [torch.arange(first, last, dtype=torch.uint8) for first, last in ((0, 3), (3, 4), (10, 15))]
    memory, expected = JoinedPieces(pieces), [0, 1, 2, 3, 10, 11, 12, 13, 14]
    for first in range(9):
        for end in range(first + 1, 10):
            found, part = torch.empty(end - first, dtype=torch.uint8), memory.view(first, end - first)
            memory.read(first, end - first, found.data_ptr())
            assert found.tolist() == expected[first:end]
            is_one_piece = any(begin <= first and end <= last for begin, last in ((0, 3), (3, 4), (4, 9)))
            assert (part is not None) == is_one_piece
            if part is not None:
                assert part.tolist() == expected[first:end]
    memory.view(5, 2)[0] = 99
    assert pieces[2].tolist() == [10, 99, 12, 13, 14]
