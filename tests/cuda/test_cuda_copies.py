"""``copy_segments`` on a GPU against its twin, bit for bit, alone and as the two ends of a byte stream."""

from __future__ import annotations

import pytest
import torch
from one_rank import OneRank

from fusco import Segments
from fusco.cuda.kernels.copy_segments import copy_segments as copy_on_device
from generator import any_bits, number_of, random_of
from reference.copy_segments import copy_segments

pytestmark = pytest.mark.cuda


def scattered(num_segments: int, largest: int, unit: int, seed: int):
    """Sizes and places of segments, in any order and with gaps, all multiples of ``unit``; and the room needed."""
    sizes = torch.randint(0, largest + 1, (num_segments,), generator=random_of(seed, "sizes"))
    order = torch.randperm(num_segments, generator=random_of(seed, "order"))
    ends = (sizes[order] + 2).cumsum(0)
    offset = torch.empty_like(sizes)
    offset[order] = ends - sizes[order] - 1
    return sizes * unit, offset * unit, int(sizes.sum() + 2 * num_segments + 1) * unit


def copy_and_compare(one: OneRank, src, src_offset, dst_offset, sizes, dst_bytes: int) -> None:
    expected = any_bits((dst_bytes,), torch.uint8, "dst")
    there, dst = src.to(one.device), expected.to(one.device, copy=True)
    launcher = one.comm._engine._context.launcher(torch.cuda.current_stream(one.device))
    copy_on_device(launcher, there, src_offset, dst, dst_offset, sizes)
    copy_segments(src, src_offset, expected, dst_offset, sizes)
    assert torch.equal(dst.cpu(), expected)


@pytest.mark.parametrize("unit", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("seed", range(8))
def test_random_segments(one: OneRank, seed, unit):
    num_segments, largest = number_of(0, 60, seed, "segments"), number_of(0, 700, seed, "largest")
    sizes, dst_offset, dst_bytes = scattered(num_segments, largest, unit, seed)
    src = any_bits(((largest + 50) * unit,), torch.uint8, seed, "src")
    room = (len(src) - sizes) // unit + 1
    src_offset = (torch.rand(num_segments, generator=random_of(seed, "from")) * room).long() * unit
    copy_and_compare(one, src, src_offset, dst_offset, sizes, dst_bytes)


def test_segments_that_are_cut_into_pieces(one: OneRank):
    sizes = torch.tensor([16384, 16385, 100_000, 1, 0, 131_072])
    dst_offset = torch.tensor([0, 16_400, 40_000, 150_001, 150_010, 160_000])
    src = any_bits((200_000,), torch.uint8, "large")
    copy_and_compare(one, src, torch.tensor([3, 0, 16, 7, 9, 4096]), dst_offset, sizes, 300_000)


def test_one_segment_is_a_plain_copy(one: OneRank):
    src = any_bits((70_000,), torch.uint8, "one")
    for size in (0, 1, 16, 65_001):
        copy_and_compare(one, src, torch.tensor([3]), torch.tensor([17]), torch.tensor([size]), 66_000)


def test_a_large_segment_among_small_ones_of_odd_sizes(one: OneRank):
    sizes = torch.tensor([5, 16, 0, 3_000_001, *range(300)])
    dst_offset = sizes.cumsum(0) - sizes
    src = any_bits((3_100_000,), torch.uint8, "unequal")
    src_offset = 16 * torch.arange(len(sizes))
    copy_and_compare(one, src, src_offset, dst_offset, sizes, int(sizes.sum()))


def test_nothing_to_copy(one: OneRank):
    none = torch.zeros(0, dtype=torch.int64)
    copy_and_compare(one, torch.zeros(16, dtype=torch.uint8), none, none, none, 16)
    zeros = torch.zeros(3, dtype=torch.int64)
    copy_and_compare(one, torch.zeros(16, dtype=torch.uint8), zeros, zeros, zeros, 16)


@pytest.mark.parametrize("seed", range(4))
def test_a_byte_stream_to_itself(one: OneRank, seed):
    # Longer than the slots of a ring together (four of 64 KiB), so that they are used again.
    sizes, offset, num_bytes = scattered(40, (100, 5_000, 20_000, 3)[seed], 1, seed)
    src, dst = (any_bits((num_bytes,), torch.uint8, seed, name) for name in ("src", "dst"))
    # What is read in one order is written in another.
    order = torch.randperm(len(sizes), generator=random_of(seed, "other order"))
    there, here = src.to(one.device), dst.to(one.device, copy=True)
    one.comm.shuffle({0: Segments(there, offset, sizes)}, {0: Segments(here, offset[order], sizes[order])})
    stream = torch.cat([src[o : o + n] for o, n in zip(offset.tolist(), sizes.tolist(), strict=True)])
    starts = sizes[order].cumsum(0) - sizes[order]
    copy_segments(stream, starts, dst, offset[order], sizes[order])
    assert torch.equal(here.cpu(), dst)
