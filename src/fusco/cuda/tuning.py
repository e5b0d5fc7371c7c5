"""Constants and pure functions that fix launch shapes, slice sizes and polling.

They were measured on 2 NVIDIA H200 (132 SMs), torch 2.11, CUDA 13.0, 2026-11-22, with
``fusco bench shuffle --device cuda``: docs/data/launch-shapes.jsonl has the values that were tried, what each took, and
which constants were not measured.
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

GATHER_SMS = 8  # packs rows several times as fast as any network takes them
# Rows without a token that messages of a dispatch may have, so that the host need not wait until rows are counted.
MAX_EMPTY_BYTES = 512 << 10
INTERNODE_SMS = 32  # of all kernels between nodes: faster than networks, and NCCL's kernels need SMs, too


# --- Blocks ---

PLAN_THREADS, PLAN_PAIRS_PER_BLOCK = 512, 1024
SMALL_PLAN_THREADS, SMALL_PLAN_PAIRS = 1024, 2048  # one block keeps all experts in registers, without a barrier
# Fewer blocks where they share SMs with blocks that push rows.
MIDDLE_PLAN_PAIRS, MIDDLE_PLAN_PAIRS_PER_BLOCK = 32_768, 2048
PLAN_FORWARDING_THREADS = 1024  # one block per node
GATHER_THREADS = 512
# Not tuned on GPUs. Few threads to a block of ``divide_rows``: experts have shared memory, on several SMs.
CHOOSE_OWNERS_THREADS = CHOOSE_OWNERS_PAIRS = 512
SHARE_COUNTS_THREADS, DIVIDE_ROWS_THREADS, PLAN_BATCH_WARPS = 1024, 64, 32
# A warp has a chunk under way. Copies of 18.9 MB between two H200 took 106 us, 142 us by chunks of 4 KiB, and 110 us by
# twice as many blocks of half as many threads with these. 1024 slots for each of 8 ranks are 64 MiB.
COPY_EXPERTS_THREADS, COPY_EXPERTS_BLOCKS, COPY_EXPERTS_DEPTH, COPY_EXPERTS_CHUNK = 512, 32, 2, 8 << 10
# Two slots of 4 KiB of each channel are a ring of byte streams.
EXCHANGE_THREADS, EXCHANGE_CHANNELS, EXCHANGE_DEPTH = 512, 512, 2
ADD_RETURNED_THREADS, ADD_RETURNED_BLOCKS_PER_SM = 256, 4
WEIGHT_GRADIENTS_THREADS, WEIGHT_GRADIENTS_BLOCKS_PER_SM = 256, 8
WEIGHTED_SUM_THREADS = 256  # of benchmarks only; not tuned

FEW_SMS = 40  # a budget that leaves the others to other work; more threads hide latency there
STREAMED_BYTES = 64 << 20  # of an output that L2 (50 MB on an H200) cannot keep
SCATTER_UNROLL = 8  # vectors in flight per lane

ROWS_FOR_ALL_WARPS = 12_000  # below this number of rows on a node, warps share them
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

    All SMs of a launch are then taken while it waits for ranks, which pays for few rows only.

    >>> pushes_early(256), pushes_early(16_384)
    (True, False)
    """
    return num_rows <= _EARLY


def scatter_threads(num_sms: int) -> int:
    """Return the threads of a block of ``scatter_rows``, one block on each SM.

    >>> scatter_threads(32), scatter_threads(132)
    (1024, 512)
    """
    return 1024 if num_sms <= FEW_SMS else 512


def scatter_parts(num_rows: int, vectors_per_lane: int) -> int:
    """Return how many warps share a row of ``vectors_per_lane`` vectors; ranks must agree, as in ``combine_parts``.

    As many as have a round of vectors each; with few rows more, as not all warps have one.

    >>> scatter_parts(16_384, 28), scatter_parts(16_384, 8), scatter_parts(256, 8)
    (4, 1, 4)
    """
    by_vectors = min(MAX_PARTS, -(-vectors_per_lane // SCATTER_UNROLL))
    return max(1, MAX_PARTS if num_rows <= _SMALL else by_vectors)


def scatter_senders(rounds: float, num_sms: int) -> int:
    """Return the blocks of ``scatter_rows`` in which warps begin with this rank's rows; ``rounds`` is items per warp.

    All of them if there are items for half of all warps at most (128 tokens). Else not all: stores to peers are as fast
    as the link, and the other blocks have the local memory for themselves.

    >>> scatter_senders(0.5, 132), scatter_senders(1.0, 132), scatter_senders(64.0, 32), scatter_senders(64.0, 1)
    (132, 79, 24, 1)
    """
    if rounds <= 0.5:
        return num_sms
    return max(1, num_sms * 3 // 4 if num_sms <= FEW_SMS else num_sms * 3 // 5)


def are_streamed(num_rows: int, row_bytes: int) -> bool:
    """Return whether a dispatch stores its output past the caches: so many rows, here, of all payloads together.

    Where they exceed L2, those that are read later would have left it anyway.

    >>> are_streamed(8192 * 8, 14_336), are_streamed(128 * 8, 14_336)
    (True, False)
    """
    return num_rows * row_bytes > STREAMED_BYTES


# Vectors of a stage of all lanes of a block, and of one lane at most: 168 KiB of shared memory in 3 stages, and sums
# that fit into registers.
RING_VECTORS, MAX_PIECE_VECTORS = 3584, 14


def _even(vectors: int, most: int) -> int:
    """Return the size of equal pieces of ``vectors``, of which each has at most ``most``, rounded up."""
    return -(-vectors // -(-vectors // most))


def piece_vectors(num_rows: int, vectors_per_lane: int) -> int:
    """Return the vectors of a row that each lane sums at a time in ``combine_rows``, unless SMs are few.

    More take fewer rounds of loads, which wait for memory. Up to 1024 tokens on each of 2 ranks, several warps share a
    row, and each has one piece.

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

    With several, the last token ends sooner; on few SMs that costs more than it brings.

    >>> sum_parts(1, 4, 132), sum_parts(1, 2, 132), sum_parts(1, 4, 32), sum_parts(4, 4, 132)
    (4, 2, 1, 4)
    """
    return num_parts if num_parts > 1 or num_sms <= FEW_SMS else max(1, min(MAX_PARTS, num_pieces))


def combine_senders(rounds: float, num_rows: int, num_sms: int) -> int:
    """Return the blocks of ``combine_rows`` in which warps begin to send; see ``scatter_senders``.

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


QUANTIZE_THREADS, QUANTIZE_BLOCKS_PER_SM = 256, 4  # of quantize_rows: four runs a warp in flight; not measured on GPUs

# --- Bytes ---

COPY_THREADS, COPY_BLOCKS_PER_SM = 256, 4  # of copy_segments
COPY_MIN_PIECE_BYTES, COPY_MAX_PIECE_BYTES = 1 << 10, 16 << 10  # not measured on GPUs


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
NCCL_CHANNELS, NCCL_DEFAULT_CHANNELS_PER_PEER = 4, 2


def channels_per_peer(num_remote_nodes: int) -> int | None:
    """Return how many NCCL channels to ask for per peer, or ``None`` to leave it to NCCL.

    >>> channels_per_peer(1), channels_per_peer(3)
    (4, None)
    """
    channels = NCCL_CHANNELS // num_remote_nodes
    return channels if channels > NCCL_DEFAULT_CHANNELS_PER_PEER else None


# How long a rank polls without pauses for records of peers and for its device: as long as hosts may be ahead of their
# devices in training. With pauses a device may be idle for half a millisecond. Not measured on GPUs.
SPIN_S = 50e-3
