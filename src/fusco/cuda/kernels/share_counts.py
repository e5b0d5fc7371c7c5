"""The kernel ``share_counts``: the pairs of each expert, of all ranks of the node.

In the arena behind its layout: a flag for each rank, then counts of two launches, of each rank and expert.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache

import torch

from fusco.cuda.kernels.abi import I32, I64, POINTER, U64, struct
from fusco.cuda.kernels.comm import comm_type
from fusco.cuda.kernels.launcher import Launcher
from fusco.cuda.tuning import SHARE_COUNTS_THREADS

_FLAG_BYTES = 128  # of one node: at most 32 ranks


@cache
def share_type(num_ranks: int) -> type[ctypes.Structure]:
    """``ShareArgs`` of share_counts.cu."""
    return struct(
        "ShareArgs",
        (comm_type(num_ranks), "comm"),
        (POINTER, "topk_idx counts"),
        (U64, "ready arrived"),
        (I64, "num_pairs"),
        (I32, "num_experts"),
        (I32 * num_ranks, "ranks"),
    )


def shared_count_bytes(num_ranks: int, num_experts: int) -> int:
    """Return the bytes that a rank's peers write to, a multiple of 128."""
    return _FLAG_BYTES + -(-2 * num_ranks * num_experts * 4 // 128) * 128


def share_counts(
    launcher: Launcher, topk_idx: torch.Tensor, counts: torch.Tensor, offset: int, node_ranks: Sequence[int]
) -> None:
    """Write the pairs of each expert of each rank of the node; all ranks launch it, in the same order.

    The kernel waits for the other ranks. If one does not come, the communicator breaks, and all counts are 0.

    Args:
        launcher: of this rank.
        topk_idx: ids of this rank, int32 or int64 (T, K); invalid ones do not count.
        counts: int32 (R, E) of this rank, of all nodes; the rows of ``node_ranks`` are written.
        offset: of ``shared_count_bytes(len(node_ranks), E)`` in every arena of the node, a multiple of 128.
        node_ranks: the ranks of the node.
    """
    ids, num_experts = topk_idx.contiguous(), counts.shape[1]
    arguments = share_type(launcher.num_ranks)(
        comm=launcher.comm,
        topk_idx=ids.data_ptr(),
        counts=counts.data_ptr(),
        ready=offset,
        arrived=offset + _FLAG_BYTES,
        num_pairs=ids.numel(),
        num_experts=num_experts,
        ranks=tuple(node_ranks),
    )
    launcher.launch(
        "share_counts",
        {"ID_BYTES": ids.element_size()},
        arguments,
        grid=1,
        num_threads=SHARE_COUNTS_THREADS,
        shared_bytes=4 * num_experts,
    )
