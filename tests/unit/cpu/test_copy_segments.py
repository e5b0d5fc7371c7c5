"""``copy_segments`` against its PyTorch twin, bit for bit."""

import numpy as np
import pytest
import torch

from fusco import Segments
from fusco.cpu.kernels.copy_segments import SegmentMemory, concatenate, copy_segments
from fusco.reference.copy_segments import copy_segments as reference
from generator import any_bits, number_of, random_of


def test_a_segment_goes_to_two_places():
    dst = torch.zeros(6, dtype=torch.uint8)
    two = torch.tensor([2, 2, 1])
    copy_segments(torch.arange(5, dtype=torch.uint8), torch.tensor([3, 3, 0]), dst, torch.tensor([0, 4, 2]), two)
    assert dst.tolist() == [3, 4, 0, 0, 3, 4]


def test_later_segments_overwrite_earlier_ones():
    src, dst = torch.arange(1, 6, dtype=torch.uint8), torch.zeros(4, dtype=torch.uint8)
    copy_segments(src, torch.tensor([0, 3]), dst, torch.tensor([0, 1]), torch.tensor([4, 2]))
    assert dst.tolist() == [1, 4, 5, 4]


def test_nothing_to_copy():
    none, nowhere = torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.uint8)
    copy_segments(nowhere, none, nowhere, none, none)
    dst = torch.full((3,), 7, dtype=torch.uint8)
    copy_segments(dst.clone(), torch.tensor([1, 3]), dst, torch.tensor([0, 3]), torch.tensor([0, 0]))
    assert dst.tolist() == [7, 7, 7]


@pytest.mark.parametrize("seed", range(60))
def test_random_segments(seed):
    num_segments, largest = number_of(0, 40, seed, "segments"), number_of(0, 300, seed, "largest")
    sizes = torch.randint(0, largest + 1, (num_segments,), generator=random_of(seed, "sizes"))
    src = any_bits((2 * largest + 7,), torch.uint8, seed, "src")
    src_offset = (torch.rand(num_segments, generator=random_of(seed, "from")) * (len(src) - sizes + 1)).long()
    # Any order of destinations, with gaps between them.
    order = torch.randperm(num_segments, generator=random_of(seed, "order"))
    ends = (sizes[order] + 3).cumsum(0)
    dst_offset = torch.empty_like(sizes)
    dst_offset[order] = ends - sizes[order] - 1

    poison = any_bits((int(sizes.sum()) + 3 * num_segments,), torch.uint8, seed, "dst")
    copied, expected = poison.clone(), poison.clone()
    copy_segments(src, src_offset, copied, dst_offset, sizes)
    reference(src, src_offset, expected, dst_offset, sizes)
    assert torch.equal(copied, expected)


def test_arrays_that_are_views_with_strides():
    src, dst = any_bits((100,), torch.uint8, "src"), torch.zeros(100, dtype=torch.uint8)
    table = torch.tensor([[0, 50, 10], [30, 0, 20]])
    copy_segments(src, table[:, 0], dst, table[:, 1], table[:, 2])
    assert torch.equal(dst[50:60], src[:10])
    assert torch.equal(dst[:20], src[30:50])


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
    memory, found = SegmentMemory(parts), torch.full((8,), 255, dtype=torch.uint8)
    for first in range(9):
        for end in range(first, 9):
            found.fill_(255)
            memory.read(first, end - first, found.data_ptr())
            assert found.tolist() == [7, 8, 3, 4, 5, 6, 101, 102][first:end] + [255] * (8 - end + first)
    new = torch.arange(50, 56, dtype=torch.uint8)
    memory.write(1, 6, new.data_ptr())
    assert base.tolist() == [0, 1, 2, 51, 52, 53, 54, 7, 50, 9]
    assert other.tolist() == [100, 55, 102, 103]
