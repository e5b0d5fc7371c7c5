"""The kernel ``copy_experts``: copies of a batch's plan within a node, and their gradients, as the device has planned.

A rank sends and receives at once, by 512 warps of 32 blocks. An expert of B bytes is read once and stored once over
NVLink, and at its new place read and written once more. A warp has a chunk of 8 KiB under way, each of which takes it
some 15 us, most of which must be flags and counters. Two H200 reached 178 GB/s of 390, 53 us for an expert of 9.4 MB
(docs/balance.md).
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import groupby

import torch

from fusco.core.rows import row_bytes
from fusco.cuda.kernels.abi import ELEMENT_TYPES, I32, I64, POINTER, U64, WARP_SIZE, struct
from fusco.cuda.kernels.comm import comm_type
from fusco.cuda.kernels.launcher import Launcher
from fusco.cuda.kernels.plan_batch import DeviceBatches
from fusco.cuda.kernels.share_counts import shared_count_bytes
from fusco.cuda.tuning import (
    COPY_EXPERTS_BLOCKS as MAX_BLOCKS,
    COPY_EXPERTS_CHUNK as CHUNK_BYTES,
    COPY_EXPERTS_DEPTH as DEPTH,
    COPY_EXPERTS_THREADS as NUM_THREADS,
)

_MAX_TENSORS = 16  # of a launch
_NUM_WORDS = 4  # flags and counters of each channel and peer
_PLACE_INTS = 5  # of shared memory, for each spare place of the node

_ExpertTensor = struct("ExpertTensor", (POINTER, "source target"), (I64, "source_pitch target_pitch num_bytes"))


@cache
def copy_experts_type(num_ranks: int, num_tensors: int) -> type[ctypes.Structure]:
    """``CopyExpertsArgs`` of copy_experts.cu."""
    return struct(
        "CopyExpertsArgs",
        (comm_type(num_ranks), "comm"),
        (POINTER, "plan homes"),
        (U64, "section"),
        (_ExpertTensor * num_tensors, "tensors"),
        (I32, "num_experts places_per_rank spare_places num_targets"),
    )


def copied_bytes(num_ranks: int) -> int:
    """Return the bytes of an arena that copies need: flags, then slots."""
    num_channels = _num_blocks(num_ranks) * NUM_THREADS // WARP_SIZE
    flags = -(-4 * _NUM_WORDS * num_channels * num_ranks // 128) * 128
    return flags + num_channels * num_ranks * DEPTH * CHUNK_BYTES


def _num_blocks(num_ranks: int) -> int:
    """Return the blocks of every rank: fewer for more than 8 ranks, so that slots never take more than 64 MiB."""
    return min(MAX_BLOCKS, max(1, 8 * MAX_BLOCKS // num_ranks))


def bytes_of_experts(num_ranks: int, num_physical: int, num_experts: int | None) -> int:
    """Return the bytes of an arena behind its layout: for counts and, if there are places for copies, for them."""
    has_places = num_experts is not None and num_experts < num_physical
    return shared_count_bytes(num_ranks, num_physical) + has_places * copied_bytes(num_ranks)


def copy_constants(num_ranks: int, num_tensors: int, sums_of: torch.dtype | None) -> dict[str, object]:
    """Return the compile-time constants for as many tensors, whose gradients, if they are added, have a dtype."""
    return {
        "NUM_TENSORS": num_tensors,
        "NUM_BLOCKS": _num_blocks(num_ranks),
        "DEPTH": DEPTH,
        "CHUNK_BYTES": CHUNK_BYTES,
        "IS_SUM": int(sums_of is not None),
        "ELEMENT": ELEMENT_TYPES[sums_of or torch.float32],
    }


def copy_experts(
    launcher: Launcher,
    batches: DeviceBatches,
    plan: torch.Tensor,
    offset: int,
    sources: Sequence[torch.Tensor],
    targets: Sequence[torch.Tensor],
    *,
    is_sum: bool = False,
) -> None:
    """Copy experts to spare places as a plan says, all tensors of a rank by one launch (of 16 at most).

    All ranks of the only node launch it, in the same order. If a rank does not come, the communicator breaks, and the
    targets are filled with bytes of 0xff.

    Args:
        launcher: of this rank.
        batches: the tables that ``plan`` was made with.
        plan: the result of ``plan_batch`` on the device, the same on all ranks.
        offset: of ``copied_bytes`` in every arena, a multiple of 128.
        sources: (P, ...), experts at home, whose rows are contiguous; with ``is_sum`` spare places.
        targets: (spare places, ...), contiguous; places without a copy become zero. With ``is_sum`` (P, ...), of the
            dtypes of sums, to which gradients of copies are added, in ascending order of rank.
        is_sum: gradients return home.
    """
    num_ranks, spare_places = launcher.num_ranks, batches.balance.spare_places
    for dtype, group in _groups(sources, targets, is_sum=is_sum):
        tensors = tuple(
            (source.data_ptr(), target.data_ptr(), *map(_pitch, (source, target)), row_bytes(source))
            for source, target in group
        )
        arguments = copy_experts_type(num_ranks, len(tensors))(
            comm=launcher.comm,
            plan=plan.data_ptr(),
            homes=batches.places.data_ptr(),
            section=offset,
            tensors=tensors,
            num_experts=len(batches.homes),
            places_per_rank=batches.placement.physical.num_experts // num_ranks,
            spare_places=spare_places,
            num_targets=len(group[0][1]),
        )
        launcher.launch(
            "copy_experts",
            copy_constants(num_ranks, len(tensors), dtype),
            arguments,
            grid=_num_blocks(num_ranks),
            num_threads=NUM_THREADS,
            shared_bytes=4 * _PLACE_INTS * num_ranks * spare_places,
        )


def _pitch(tensor: torch.Tensor) -> int:
    """Return the bytes from one place to the next."""
    return tensor.stride(0) * tensor.element_size()


def _groups(
    sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], *, is_sum: bool
) -> Iterator[tuple[torch.dtype | None, list[tuple[torch.Tensor, torch.Tensor]]]]:
    """Yield the tensors of each launch: those that are added have one dtype, which is given."""
    pairs = list(zip(sources, targets, strict=True))
    for dtype, same in groupby(pairs, lambda pair: pair[0].dtype if is_sum else None):
        group = list(same)
        for first in range(0, len(group), _MAX_TENSORS):
            yield dtype, group[first : first + _MAX_TENSORS]
