"""Constants and pure functions that fix launch shapes, slice sizes and polling, each with its source.

H200 means NVIDIA H200 (132 SMs) on NVLink 4, torch 2.11, CUDA 13.0. Times are ``fusco bench shuffle --device cuda`` at
8192 tokens of hidden 7168, top-8 of 256, bf16, unless a line says otherwise. "Single runs" are those of "What was
tried" in docs/performance/cuda.md, of 2026-11-21: mostly one kernel in a CUDA graph, not that command. No other GPU was
measured. "Source not recorded" means that neither a document nor a commit says why the value is this one.

Constants of the CUDA sources are there: unrolling in each ``.cu`` file (source not recorded), pauses between polls in
``comm.cuh`` (source not recorded).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class BlockShape:
    """Launch shape of ``combine_rows``: threads of a block, blocks per SM, and vectors in flight per lane."""

    num_threads: int
    blocks_per_sm: int
    unroll: int


# --- SMs of a launch without a budget ---

# 4 H200, single runs: with 16 SMs instead of all, the concurrent plan takes 0.034 ms instead of 0.067, and a dispatch
# 1.026 instead of 1.095. 2 H200, aacd3b1: a dispatch takes 0.481 ms; single runs with 32 and 48 SMs took 0.486, 0.524.
STAGE_SMS = 16
# Packs rows several times as fast as any network takes them. Timeline of 2 x 2 H200 in docs/performance/internode.md:
# both slices are packed in 0.19 ms, the network takes 5.6 ms for the first. Other values: source not recorded.
GATHER_SMS = 8
# A budget for all kernels between nodes: faster than networks, and NCCL's kernels need SMs, too. Source not recorded;
# within a node 32 SMs cost 2.28 ms instead of 2.01 (dispatch and combine, 4 H200, 6363ee4).
INTERNODE_SMS = 32
# The same budget where FSDP's collectives run concurrently (787009b); the same measurement.
FSDP_SMS = 32


def stage_sms(num_sms: int | None) -> int:
    """Return the SMs that copy rows into the pool, of a budget ``num_sms`` or of the whole device (``None``).

    A quarter of a budget: 8 of 32 staging concurrently took a dispatch from 1.083 to 1.059 ms (4 H200, single
    runs). Staging is faster than links empty the pool, and more SMs would slow down the concurrent plan.

    >>> stage_sms(None), stage_sms(32), stage_sms(1)
    (16, 8, 1)
    """
    return max(1, num_sms // 4) if num_sms else STAGE_SMS


def scatter_sms(num_ranks: int) -> int:
    """Return the SMs that pull rows where there is no budget; more only contend.

    12, 16, 24, 32, 48, 132 SMs took 1.51, 1.17, 1.01, 0.99, 0.99, 1.02 ms on 4 H200 (single runs, blocks of
    1024 threads and 4 vectors; today's have 512 and 8). With fewer ranks, each writes more copies of a row; that this
    is in proportion was not measured.

    >>> scatter_sms(4), scatter_sms(2)
    (48, 96)
    """
    return 192 // num_ranks


# --- Blocks ---

# Threads: half of an SM, so that staging fits next to it. Vectors in flight per lane: source not recorded.
SCATTER_THREADS, SCATTER_UNROLL = 512, 8
PLAN_THREADS, PLAN_PAIRS_PER_BLOCK = 512, 1024  # 4c3fc1a; source not recorded
PLAN_FORWARDING_THREADS = 1024  # one block per node; source not recorded
STAGE_THREADS = 512  # 4c3fc1a; source not recorded
GATHER_THREADS = 512  # source not recorded
ADD_RETURNED_THREADS, ADD_RETURNED_BLOCKS_PER_SM = 256, 4  # source not recorded
# Chosen without a GPU (f9ad207). Measured later with these values: 0.734 ms for 65,536 rows of 7168 bf16, 3.84 TB/s of
# the 4.15 that a copy reaches (one H200, mean of 10, b803365). Other values were not measured.
WEIGHT_GRADIENTS_THREADS, WEIGHT_GRADIENTS_BLOCKS_PER_SM = 256, 8
WEIGHTED_SUM_THREADS = 256  # of benchmarks only; not tuned

# combine_rows, 4 H200, single runs: 132 SMs took 1.56 ms with 512 threads and 4 vectors in flight per lane, and 0.98
# with fewer warps and 7; 32 SMs took 1.91 ms, and 1.23 with more warps and 2. On few SMs many warps hide latency; on
# many, fewer warps with more vectors in flight do so with less contention. The boundary of 40 SMs: source not recorded.
COMBINE_FEW_SMS = 40
COMBINE_ON_FEW_SMS, COMBINE_ON_MANY_SMS = BlockShape(512, 2, 2), BlockShape(384, 1, 7)

# Below this number of rows, warps share them. 1024 tokens: combine 0.20 -> 0.15 ms (4 H200, single runs).
ROWS_FOR_ALL_WARPS = 12_000


def combine_shape(num_sms: int) -> BlockShape:
    """Return the launch shape of ``combine_rows`` on this number of SMs.

    >>> combine_shape(32).num_threads, combine_shape(132).num_threads
    (512, 384)
    """
    return COMBINE_ON_FEW_SMS if num_sms <= COMBINE_FEW_SMS else COMBINE_ON_MANY_SMS


def parts_of_row(num_rows: int, max_parts: int) -> int:
    """Return how many warps share a row, so that every warp has several shares and all end at about the same time.

    Ranks must agree on it, since each part is announced separately: it may depend on nothing but the plan.

    >>> parts_of_row(1_000, 4), parts_of_row(5_000, 4), parts_of_row(32_768, 4)
    (4, 2, 1)
    """
    return max(1, min(max_parts, ROWS_FOR_ALL_WARPS // max(1, num_rows)))


# --- Bytes ---

COPY_THREADS, COPY_BLOCKS_PER_SM = 256, 4  # of copy_segments, 4c3fc1a and a50593a; source not recorded
COPY_MIN_PIECE_BYTES, COPY_MAX_PIECE_BYTES = 1 << 10, 16 << 10  # a50593a; not measured on GPUs


def copy_piece_bytes(num_bytes: int, max_blocks: int) -> int:
    """Return the bytes that a block of ``copy_segments`` copies at a time: less only if all blocks have too little.

    >>> copy_piece_bytes(1 << 30, 528), copy_piece_bytes(4000, 528)
    (16384, 1024)
    """
    return min(COPY_MAX_PIECE_BYTES, max(COPY_MIN_PIECE_BYTES, -(-num_bytes // max_blocks)))


# Within a node: a slot of a byte stream, as on the CPU (docs/performance/alltoall.md). Not measured on GPUs.
STREAM_SLICE_BYTES = 1 << 20
# Between nodes: by the calculation in docs/design.md ("On CUDA, between nodes"). No other size was tried.
NETWORK_SLICE_BYTES = 16 << 20

# --- Network and host ---

# NCCL channels for everything that a rank sends to other nodes at a time, and those that NCCL 2.28 takes per peer.
# Without fusco, 2 H200 as 2 nodes over sockets: one peer gets 5.4 to 5.6 GB/s with 4 channels, 4.8 to 5.2 with NCCL's
# default. In fusco there was no gain on 2 nodes x 1 (89f6bec). 2 nodes of several ranks, for which it is meant, were
# not measured (docs/performance/internode.md, "What was tried").
NCCL_CHANNELS, NCCL_DEFAULT_CHANNELS_PER_PEER = 4, 2


def channels_per_peer(num_remote_nodes: int) -> int | None:
    """Return how many NCCL channels to ask for per peer, or ``None`` to leave it to NCCL.

    >>> channels_per_peer(1), channels_per_peer(3)
    (4, None)
    """
    channels = NCCL_CHANNELS // num_remote_nodes
    return channels if channels > NCCL_DEFAULT_CHANNELS_PER_PEER else None


# How long a rank polls without pauses for records of peers and for its device: as long as hosts may be ahead of their
# devices in training. With pauses a device may be idle for half a millisecond. From reading the code
# (docs/performance/cuda.md, "The same on 2 GPUs"); not measured on GPUs.
SPIN_S = 50e-3
