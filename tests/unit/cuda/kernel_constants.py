"""Compile-time constants of every CUDA kernel: those of a launch, and a grid of all kinds."""

from __future__ import annotations

import ctypes
import itertools
from typing import TypeAlias

import torch

from fusco.cuda.kernels.abi import CHUNK_PAIRS, vector_bytes
from fusco.cuda.kernels.add_returned import returned_type
from fusco.cuda.kernels.choose_owners import ChooseArgs
from fusco.cuda.kernels.combine_rows import combine_type, fitting_ring
from fusco.cuda.kernels.copy_experts import copy_constants, copy_experts_type
from fusco.cuda.kernels.copy_segments import CopyArgs
from fusco.cuda.kernels.divide_rows import DivideArgs
from fusco.cuda.kernels.exchange_rows import EXCHANGE_CONSTANTS, exchange_type
from fusco.cuda.kernels.gather_rows import gather_type
from fusco.cuda.kernels.node_barrier import barrier_type
from fusco.cuda.kernels.plan import plan_type
from fusco.cuda.kernels.plan_batch import BATCH_CONSTANTS, BatchArgs
from fusco.cuda.kernels.plan_forwarding import ForwardingArgs
from fusco.cuda.kernels.quantize_rows import QuantizeArgs
from fusco.cuda.kernels.scatter_rows import scatter_type
from fusco.cuda.kernels.share_counts import share_type
from fusco.cuda.kernels.weight_gradients import WeightArgs
from fusco.cuda.kernels.weighted_sum import WeightedSumArgs
from fusco.cuda.tuning import MAX_PARTS, combine_shape
from fusco.offload.driver import COPY_CHUNK

NUM_RANKS = (1, 2, 4, 8)
ITEM_BYTES = {"BF16": 2, "F16": 2, "F32": 4, "F64": 8}

Constants: TypeAlias = dict[str, object]


def constants_of(struct: type[ctypes.Structure], num_ranks: int, num_threads: int, **others: object) -> Constants:
    sizes = {"ARGUMENT_BYTES": ctypes.sizeof(struct), "NUM_THREADS": num_threads}
    return {**sizes, "NUM_RANKS": num_ranks, "MAX_PARTS": MAX_PARTS, **others}


def plan(
    num_ranks: int, num_nodes: int, num_topk: int, id_bytes: int, weight_bytes: int, num_threads: int = 512
) -> Constants:
    return constants_of(
        plan_type(num_ranks, num_nodes),
        num_ranks,
        num_threads,
        NUM_NODES=num_nodes,
        NUM_TOPK=num_topk,
        ID_BYTES=id_bytes,
        WEIGHT_BYTES=weight_bytes,
        CHUNK_PAIRS=CHUNK_PAIRS,
    )


def scatter_rows(num_ranks: int, num_topk: int, *row_bytes: int, is_early: int = 0, is_streamed: int = 0) -> Constants:
    return constants_of(
        scatter_type(num_ranks, len(row_bytes)),
        num_ranks,
        512,
        NUM_TOPK=num_topk,
        NUM_PAYLOADS=len(row_bytes),
        PAYLOAD_BYTES=",".join(map(str, row_bytes)),
        VECTOR_BYTES=",".join(str(vector_bytes(size)) for size in row_bytes),
        UNROLL=8,
        IS_STREAMED=is_streamed,
        IS_EARLY=is_early,
    )


def combine_rows(
    num_ranks: int,
    num_topk: int,
    hidden: int,
    row_type: str,
    wire_type: str,
    weight_bytes: int,
    out_type: str | None = None,
    num_rows: int = 1 << 20,
) -> Constants:
    item_bytes, wire_bytes = ITEM_BYTES[row_type], ITEM_BYTES[wire_type]
    vectors_per_lane = -(-hidden * item_bytes // (vector_bytes(hidden * item_bytes) * 32))
    shape = fitting_ring(combine_shape(num_rows, vectors_per_lane, 132), 227 << 10, item_bytes, wire_bytes)
    return constants_of(
        combine_type(num_ranks),
        num_ranks,
        shape.num_threads,
        NUM_TOPK=num_topk,
        HIDDEN=hidden,
        ROW_TYPE=row_type,
        WIRE_TYPE=wire_type,
        OUT_TYPE=out_type or row_type,
        WEIGHT_BYTES=weight_bytes,
        VECTOR_ELEMENTS=vector_bytes(hidden * item_bytes) // item_bytes,
        BLOCKS_PER_SM=shape.blocks_per_sm,
        UNROLL=shape.unroll,
        DEPTH=shape.depth,
    )


def gather_rows(num_messages: int, row_bytes: int) -> Constants:
    sizes = {"ROW_BYTES": row_bytes, "VECTOR_BYTES": vector_bytes(row_bytes)}
    return constants_of(gather_type(num_messages), 1, 512, NUM_MESSAGES=num_messages, **sizes)


def weight_gradients(hidden: int, row_type: str, weight_bytes: int, has_dots: int) -> Constants:
    item_bytes = ITEM_BYTES[row_type]
    return {
        "ARGUMENT_BYTES": ctypes.sizeof(WeightArgs),
        "NUM_THREADS": 256,
        "HIDDEN": hidden,
        "ROW_TYPE": row_type,
        "WEIGHT_BYTES": weight_bytes,
        "HAS_DOTS": has_dots,
        "VECTOR_ELEMENTS": vector_bytes(hidden * item_bytes) // item_bytes,
    }


def weighted_sum(num_topk: int, hidden: int, row_type: str) -> Constants:
    item_bytes = ITEM_BYTES[row_type]
    return {
        "ARGUMENT_BYTES": ctypes.sizeof(WeightedSumArgs),
        "NUM_THREADS": 256,
        "HIDDEN": hidden,
        "NUM_TOPK": num_topk,
        "ROW_TYPE": row_type,
        "VECTOR_ELEMENTS": vector_bytes(hidden * item_bytes) // item_bytes,
    }


def add_returned(num_remote: int, hidden: int, row_type: str, wire_type: str) -> Constants:
    item_bytes = ITEM_BYTES[row_type]
    return constants_of(
        returned_type(1, num_remote),
        1,
        256,
        NUM_REMOTE=num_remote,
        HIDDEN=hidden,
        ROW_TYPE=row_type,
        WIRE_TYPE=wire_type,
        VECTOR_ELEMENTS=vector_bytes(hidden * item_bytes) // item_bytes,
    )


GRID: dict[str, list[Constants]] = {
    "plan": [
        plan(num_ranks, num_nodes, num_topk, id_bytes, weight_bytes)
        for (num_ranks, num_nodes, num_topk), (id_bytes, weight_bytes) in zip(
            # All ranks and all topk, all ids with all weights; not each with each.
            itertools.cycle([(1, 1, 1), (2, 2, 8), (4, 1, 32), (8, 4, 8), (8, 1, 32), (1, 4, 8)]),
            itertools.product((4, 8), (0, 4, 8)),
            strict=False,
        )
    ],
    "scatter_rows": [
        scatter_rows(8, 8, 14336),
        scatter_rows(8, 8, 14336, is_early=1),
        scatter_rows(8, 8, 7168, 224, is_early=1),
        scatter_rows(8, 8, 14336, is_streamed=1),
        scatter_rows(2, 8, 7168, 224, is_early=1, is_streamed=1),
        scatter_rows(2, 32, 12, is_early=1),
        scatter_rows(4, 8, 6),
        scatter_rows(1, 8, 17, 3),
        scatter_rows(4, 1, *(7168, 224, 8, 4, 2, 1, 1001, 36)),
    ],
    "combine_rows": [
        combine_rows(8, 8, 7168, "BF16", "BF16", 4),
        combine_rows(1, 1, 7168, "F16", "F16", 0, num_rows=256),
        combine_rows(2, 32, 2048, "F16", "F32", 8),
        combine_rows(4, 8, 4096, "F32", "F32", 0),
        combine_rows(8, 32, 2048, "F64", "F64", 8),
        # Odd widths: vectors of one element of every dtype, then of two and of four.
        combine_rows(8, 8, 17, "BF16", "BF16", 4),
        combine_rows(2, 1, 5, "F32", "F32", 8),
        combine_rows(1, 8, 33, "F64", "F64", 4),
        combine_rows(8, 8, 34, "F16", "F32", 4),
        combine_rows(4, 8, 1004, "BF16", "BF16", 4),
        # Between nodes: sums in the wire's dtype that go on, and sums of this node.
        combine_rows(2, 8, 7168, "BF16", "F32", 4, "F32"),
        combine_rows(4, 8, 2880, "F16", "F16", 0, "F32"),
    ],
    "plan_forwarding": [
        constants_of(ForwardingArgs, 1, 1024, NUM_TOPK=num_topk, ID_BYTES=id_bytes, WEIGHT_BYTES=weight_bytes)
        for num_topk, id_bytes, weight_bytes in ((1, 4, 0), (8, 8, 4), (32, 4, 8))
    ],
    "gather_rows": [gather_rows(*sizes) for sizes in ((1, 14336), (7, 1001), (63, 6), (3, 8), (1, 36))],
    "add_returned": [
        add_returned(1, 7168, "BF16", "BF16"),
        add_returned(3, 2880, "F16", "F32"),
        add_returned(7, 33, "F32", "F32"),
        add_returned(1, 5, "F64", "F64"),
        add_returned(2, 3, "BF16", "BF16"),
    ],
    "weight_gradients": [
        weight_gradients(7168, "BF16", 4, 1),
        weight_gradients(2880, "F16", 8, 1),
        weight_gradients(33, "F32", 4, 0),
        weight_gradients(5, "F64", 8, 1),
        weight_gradients(3, "BF16", 4, 0),
    ],
    "weighted_sum": [
        weighted_sum(8, 7168, "BF16"),
        weighted_sum(1, 2880, "F16"),
        weighted_sum(11, 33, "F32"),
        weighted_sum(2, 5, "F64"),
    ],
    "node_barrier": [constants_of(barrier_type(num_ranks), num_ranks, 32) for num_ranks in (1, 8)],
    "copy_segments": [constants_of(CopyArgs, num_ranks, 256) for num_ranks in (1, 8)],
    "copy_chunk": [COPY_CHUNK],
    "quantize_rows": [
        constants_of(QuantizeArgs, 1, 256, ROW_TYPE=row_type, BLOCK=block, RULE=rule, SCALE_BYTES=scale_bytes)
        for row_type, block, rule, scale_bytes in (
            ("BF16", 128, "AMAX", 4),
            ("F16", 256, "POWER_OF_TWO", 4),
            ("F32", 16, "POWER_OF_TWO", 1),
            ("BF16", 32, "MX_FLOOR", 1),
            ("F32", 32, "MX_CEIL", 1),
            ("BF16", 16, "NVFP4", 1),
        )
    ],
    "choose_owners": [constants_of(ChooseArgs, 1, 512, ID_BYTES=id_bytes, PAIRS_PER_BLOCK=512) for id_bytes in (4, 8)],
    "share_counts": [constants_of(share_type(ranks), ranks, 1024, ID_BYTES=size) for ranks, size in ((1, 4), (8, 8))],
    "plan_batch": [constants_of(BatchArgs, 1, threads, **BATCH_CONSTANTS) for threads in (32, 1024)],
    "copy_experts": [
        constants_of(copy_experts_type(ranks, tensors), ranks, 512, **copy_constants(ranks, tensors, dtype))
        for ranks, tensors, dtype in (
            (8, 2, None),
            (1, 16, None),
            (8, 1, torch.bfloat16),
            (4, 3, torch.float16),
            (2, 2, torch.float32),
            (32, 1, torch.float64),
        )
    ],
    "exchange_rows": [constants_of(exchange_type(ranks), ranks, 512, **EXCHANGE_CONSTANTS) for ranks in (1, 2, 8, 32)],
    "divide_rows": [constants_of(DivideArgs, 1, 64)],
}


SMALLEST = GRID["copy_segments"][0]
