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
class RingShape:
    """Launch shape of ``combine_rows``: threads of a block, blocks per SM, vectors of a stage per lane, and stages."""

    num_threads: int
    blocks_per_sm: int
    unroll: int
    depth: int


# --- SMs of a launch without a budget ---

# Packs rows several times as fast as any network takes them. Timeline of 2 x 2 H200 in docs/performance/internode.md:
# both slices are packed in 0.19 ms, the network takes 5.6 ms for the first. Other values: source not recorded.
GATHER_SMS = 8
# Rows without a token that messages of a dispatch may have, so that the host need not wait until rows are counted: that
# wait costs 0.1 ms and more (docs/performance/internode.md), these bytes 0.1 ms at 5 GB/s, 0.01 at 50.
MAX_EMPTY_BYTES = 512 << 10

# A budget for all kernels between nodes: faster than networks, and NCCL's kernels need SMs, too. Source not recorded;
# within a node 32 SMs cost 2.28 ms instead of 2.01 (dispatch and combine, 4 H200, 6363ee4).
INTERNODE_SMS = 32
# The same budget where FSDP's collectives run concurrently (787009b); the same measurement.
FSDP_SMS = 32


# --- Blocks ---

# 4c3fc1a; source not recorded.
PLAN_THREADS, PLAN_PAIRS_PER_BLOCK = 512, 1024
# One block, without a barrier of blocks, that keeps all experts in registers. 128 tokens on each of 2 H200, a graph of
# dispatch and combine (2026-11-22, medians of 15): 0.043 ms, 0.047 with two blocks of 512 threads; narrow 0.033, 0.034.
SMALL_PLAN_THREADS, SMALL_PLAN_PAIRS = 1024, 2048
# Fewer blocks where they share multiprocessors with blocks that push rows. 1024 tokens: dispatch 0.0736 instead of
# 0.0764 ms with 2048 instead of 1024 pairs a block wide, 0.0406 instead of 0.0399 narrow.
MIDDLE_PLAN_PAIRS, MIDDLE_PLAN_PAIRS_PER_BLOCK = 32_768, 2048
PLAN_FORWARDING_THREADS = 1024  # one block per node; source not recorded
GATHER_THREADS = 512  # source not recorded
ADD_RETURNED_THREADS, ADD_RETURNED_BLOCKS_PER_SM = 256, 4  # source not recorded
# Chosen without a GPU (f9ad207). Measured later with these values: 0.734 ms for 65,536 rows of 7168 bf16, 3.84 TB/s of
# the 4.15 that a copy reaches (one H200, mean of 10, b803365). Other values were not measured.
WEIGHT_GRADIENTS_THREADS, WEIGHT_GRADIENTS_BLOCKS_PER_SM = 256, 8
WEIGHTED_SUM_THREADS = 256  # of benchmarks only; not tuned

# Shapes of scatter_rows and combine_rows: 2 H200, 2026-11-22, a dispatch or a combine in a CUDA graph, medians of 15,
# uniform routing, top-8, bf16. "Wide" is hidden 7168 of 256 experts, "narrow" 2048 of 128. Few SMs are a budget that
# leaves the others to other work; more threads hide latency there.
FEW_SMS = 40
STREAMED_BYTES = 64 << 20  # of an output that L2 cannot keep; other values were not measured
SCATTER_UNROLL = 8  # vectors in flight per lane. 8192 tokens: 4 and 14 were slower in all combinations

# Below this number of rows on a node, warps share them. 1024 tokens: combine 0.20 -> 0.15 ms (4 H200, single runs).
ROWS_FOR_ALL_WARPS = 12_000
MAX_PARTS = 4  # warps that share a row
_SMALL, _MIDDLE, _EARLY = 1024, 2048, 4096  # rows on a node: up to 512 tokens on each of 2 ranks, 1024, and 2048
# Numbers of rows that between them have all launch shapes, for warm-up. Those of the last are streamed, whatever their
# size.
ROWS_OF_EACH_SHAPE = (64, _MIDDLE, 1 << 27)


def plan_shape(num_pairs: int) -> tuple[int, int]:
    """Return the threads of a block of ``plan``, and the blocks, for so many pairs of a node.

    >>> plan_shape(2048), plan_shape(16_384), plan_shape(131_072)
    ((1024, 1), (512, 8), (512, 128))
    """
    if num_pairs <= SMALL_PLAN_PAIRS:
        return SMALL_PLAN_THREADS, 1
    per_block = MIDDLE_PLAN_PAIRS_PER_BLOCK if num_pairs <= MIDDLE_PLAN_PAIRS else PLAN_PAIRS_PER_BLOCK
    return PLAN_THREADS, -(-num_pairs // per_block)


def pushes_early(num_rows: int) -> bool:
    """Return whether ranks push rows while they make the plan of a dispatch within a node.

    All multiprocessors of a launch are then taken while it waits for ranks. 2 H200, 2026-11-22, a graph of dispatch and
    combine, with and without: 128 tokens wide 0.043 and 0.050 ms, narrow 0.033 and 0.039; 1024 wide 0.148 and 0.154,
    narrow 0.073 and 0.074; 2048 wide 0.251 and 0.253; 8192 wide 0.801 and 0.799, narrow 0.287 and 0.287.

    >>> pushes_early(256), pushes_early(16_384)
    (True, False)
    """
    return num_rows <= _EARLY


def scatter_threads(num_sms: int) -> int:
    """Return the threads of a block of ``scatter_rows``, one block on each SM.

    8192 tokens on 32 SMs: 0.213 instead of 0.224 ms narrow, 0.630 and 0.628 wide; on 132: 0.403 instead of 0.386 wide.

    >>> scatter_threads(32), scatter_threads(132)
    (1024, 512)
    """
    return 1024 if num_sms <= FEW_SMS else 512


def scatter_parts(num_rows: int, vectors_per_lane: int) -> int:
    """Return how many warps share a row of ``vectors_per_lane`` vectors; ranks must agree, as in ``combine_parts``.

    As many as have a round of vectors each: 8192 tokens wide took 0.394 ms with 4 parts and 0.418 with 1, narrow
    0.202 with 4 and 0.141 with 1. With few rows more, as not all warps have one: 128 tokens narrow 0.029 with 2, 0.027
    with 4.

    >>> scatter_parts(16_384, 28), scatter_parts(16_384, 8), scatter_parts(256, 8)
    (4, 1, 4)
    """
    by_vectors = min(MAX_PARTS, -(-vectors_per_lane // SCATTER_UNROLL))
    return max(1, MAX_PARTS if num_rows <= _SMALL else by_vectors)


def scatter_senders(rounds: float, num_sms: int) -> int:
    """Return the blocks of ``scatter_rows`` in which warps begin with this rank's rows; ``rounds`` is items per warp.

    All of them if there are items for half of all warps at most (128 tokens). Else not all: stores to peers are as fast
    as the link, and the other blocks have the local memory for themselves. 8192 tokens wide with 50, 66, 80, 99, 132 of
    132: 0.420, 0.394, 0.386, 0.403, 0.45 ms; with 12, 16, 20, 24, 32 of 32: 0.658, 0.642, 0.632, 0.628, 0.632. 1024
    tokens wide with 66, 79, 99 of 132, four rounds: 0.0809, 0.0764, 0.0790; narrow with 66, 99, 132, one round: 0.0373,
    0.0373, 0.0399.

    >>> scatter_senders(0.5, 132), scatter_senders(1.0, 132), scatter_senders(64.0, 32), scatter_senders(64.0, 1)
    (132, 79, 24, 1)
    """
    if rounds <= 0.5:
        return num_sms
    return max(1, num_sms * 3 // 4 if num_sms <= FEW_SMS else num_sms * 3 // 5)


def are_streamed(num_rows: int, row_bytes: int) -> bool:
    """Return whether a dispatch stores its output past the caches: so many rows, here, of all payloads together.

    Where they exceed L2 (50 MB on an H200), those that are read later would have left it anyway. 2 H200, 2026-11-22, a
    graph of a dispatch, with and without: 8192 tokens wide 0.380 and 0.388 ms, narrow 0.135 and 0.141; 4096 wide 0.208
    and 0.211.

    >>> are_streamed(8192 * 8, 14_336), are_streamed(128 * 8, 14_336)
    (True, False)
    """
    return num_rows * row_bytes > STREAMED_BYTES


# Vectors of a stage of all lanes of a block, and of one lane at most: 168 KiB of shared memory in 3 stages, and sums
# that fit into registers. 8192 tokens of hidden 7168: a combine of 0.376 ms with 256 threads and 14 vectors, 0.401 with
# 160, 0.393 with 384 and 7; one rank alone 0.292, 0.292, 0.301, and 0.397 with 28 vectors, whose sums do not fit.
RING_VECTORS, MAX_PIECE_VECTORS = 3584, 14


def _even(vectors: int, most: int) -> int:
    """Return the size of equal pieces of ``vectors``, of which each has at most ``most``, rounded up."""
    return -(-vectors // -(-vectors // most))


def piece_vectors(num_rows: int, vectors_per_lane: int) -> int:
    """Return the vectors of a row that each lane sums at a time in ``combine_rows``, unless SMs are few.

    More take fewer rounds of loads, which wait for memory. 2 H200, 2026-11-23, a combine of 8192 tokens in a graph, ms,
    with pieces of 4 (of 7 for hidden 7168) and with these: hidden 1024 0.088 and 0.088, 2048 0.148 and 0.132, 2880
    0.202 and 0.176, 4096 0.272 and 0.236, 5120 0.328 and 0.282, 6144 0.388 and 0.329, 7168 0.399 and 0.378. 2048
    tokens: 2048 0.0573 and 0.0513, 7168 0.129 and 0.118.

    Up to 1024 tokens on each of 2 ranks, several warps share a row, and each has one piece. 1024 tokens, hidden 6144:
    0.0677 with pieces of 6, 0.0746 with 4; larger ones are slower: 0.0780 with 12, hidden 4096 0.0596 with 8 and
    0.0566 with 4, hidden 7168 0.0749 with 14 and 0.0744 with 7.

    >>> [piece_vectors(16_384, vectors) for vectors in (4, 8, 12, 16, 20, 24, 28)]
    [4, 8, 12, 8, 10, 12, 14]
    >>> [piece_vectors(2_048, vectors) for vectors in (4, 8, 12, 16, 20, 24, 28)]
    [4, 4, 4, 4, 5, 6, 7]
    """
    if num_rows <= _MIDDLE:
        return min(8, max(4, -(-vectors_per_lane // MAX_PARTS)))
    return _even(vectors_per_lane, MAX_PIECE_VECTORS)


def combine_shape(num_rows: int, vectors_per_lane: int, num_sms: int) -> RingShape:
    """Return the launch shape of ``combine_rows`` for so many rows of ``vectors_per_lane`` vectors.

    8192 tokens on 32 SMs, 512 threads: 0.699 ms wide with 7 vectors, 0.790 with 288 threads and 14; hidden 6144 0.575
    with 8 and 0.626 with 1024 threads and 4, 4096 0.410 and 0.436, narrow 0.250 and 0.245. 1024 tokens of 4096: 0.127
    and 0.088. Few rows: 128 tokens 0.025 ms with 256 threads wide, 0.028 with 384, narrow 0.021 with 256, 0.023 with
    512.

    >>> combine_shape(16_384, 28, 132)
    RingShape(num_threads=256, blocks_per_sm=1, unroll=14, depth=3)
    >>> combine_shape(16_384, 8, 132).num_threads, combine_shape(16_384, 8, 32).num_threads
    (448, 1024)
    """
    unroll = piece_vectors(num_rows, vectors_per_lane)
    if num_sms <= FEW_SMS:
        if num_rows > _MIDDLE and vectors_per_lane > 8:
            return RingShape(512, 1, _even(vectors_per_lane, 8), 3)
        return RingShape(512, 1, 7, 3) if vectors_per_lane % 7 == 0 else RingShape(1024, 1, 4, 3)
    if num_rows <= _SMALL:
        return RingShape(256, 1, unroll, 3 if unroll >= 7 else 4)
    if num_rows <= _MIDDLE:
        return RingShape(384, 1, unroll, 4)
    return RingShape(min(768, RING_VECTORS // unroll // 32 * 32), 1, unroll, 3)


def combine_parts(num_rows: int, vectors_per_lane: int) -> int:
    """Return how many warps share a row to send, so that each has several shares and all end at about the same time.

    Ranks must agree on it, since each part is announced separately, and their numbers of SMs may differ.

    >>> combine_parts(1_000, 28), combine_parts(5_000, 28), combine_parts(5_000, 8)
    (4, 2, 1)
    """
    num_pieces = -(-vectors_per_lane // piece_vectors(num_rows, vectors_per_lane))
    return max(1, min(MAX_PARTS, num_pieces, ROWS_FOR_ALL_WARPS // max(1, num_rows)))


def sum_parts(num_parts: int, num_pieces: int, num_sms: int) -> int:
    """Return how many warps share a token of ``num_pieces`` pieces to sum, where ``num_parts`` share a row to send.

    The last token ends sooner. 8192 tokens with pieces of 7 and 4 vectors: 0.392 instead of 0.404 ms with 4 instead of
    1 wide, 0.140 instead of 0.142 with 2 narrow; on 32 SMs 0.786 instead of 0.736 wide.

    >>> sum_parts(1, 4, 132), sum_parts(1, 2, 132), sum_parts(1, 4, 32), sum_parts(4, 4, 132)
    (4, 2, 1, 4)
    """
    return num_parts if num_parts > 1 or num_sms <= FEW_SMS else max(1, min(MAX_PARTS, num_pieces))


def combine_senders(rounds: float, num_rows: int, num_sms: int) -> int:
    """Return the blocks of ``combine_rows`` in which warps begin to send; see ``scatter_senders``.

    8192 tokens wide with 46, 52, 60, 72, 84 of 132 (192 threads): 0.394, 0.382, 0.375, 0.383, 0.401 ms, narrow with 46,
    52, 60, 66: 0.1372, 0.1345, 0.1330, 0.1336; wide with 12, 16, 20, 24, 32 of 32: 0.740, 0.696, 0.696, 0.696, 0.720.
    2048 tokens narrow with 46, 60, 66: 0.0538, 0.0509, 0.0508. 1024 tokens wide with 44, 88, 132: 0.081, 0.075, 0.081;
    128 tokens with 66, 110, 132: 0.026, 0.025, 0.025.
    With those of 128 tokens in one round: 1024 tokens wide, five rounds, with 72, 88, 110: 0.0744, 0.0766, 0.0780;
    narrow, 2.6 rounds: 0.0381, 0.0369, 0.0357.

    >>> combine_senders(60.0, 16_384, 132), combine_senders(60.0, 16_384, 32), combine_senders(5.0, 2048, 132)
    (60, 20, 73)
    """
    if rounds <= 1:
        return num_sms
    if num_rows <= _SMALL:
        return max(1, num_sms * 5 // 6)
    if num_rows <= _MIDDLE:
        return max(1, num_sms * 5 // (6 if rounds <= 4 else 9))
    return max(1, num_sms * 5 // 8 if num_sms <= FEW_SMS else num_sms * 5 // 11)


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
# (docs/performance/cuda.md, "On 2 GPUs"); not measured on GPUs.
SPIN_S = 50e-3
