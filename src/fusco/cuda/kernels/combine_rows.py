"""The kernel ``combine_rows``: send partial sums to the holders of rows, and add them there."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from fusco.cuda.kernels.abi import ELEMENT_TYPES, I32, POINTER, WARP_SIZE, RowsAt, struct, vector_bytes
from fusco.cuda.kernels.comm import comm_type
from fusco.cuda.kernels.held_rows import HeldRows, longest_of
from fusco.cuda.kernels.launcher import KernelCall, Launcher, PreparedLaunch
from fusco.cuda.tuning import RingShape, combine_parts, combine_senders, combine_shape, sum_parts

_ACCESS_BYTES = 16  # of a lane
_STATIC_BYTES = 256  # more than the kernel's own variables in shared memory


def fitting_ring(shape: RingShape, max_shared_bytes: int, row_item_bytes: int, wire_item_bytes: int) -> RingShape:
    """Return a shape whose stages fit into a block's shared memory: wide partial sums take as much as several rows.

    Threads are whole warps, which are fewer where not even two stages of all of them fit.
    """
    width = max(1, wire_item_bytes // row_item_bytes)
    of_warp = _stage_bytes(replace(shape, num_threads=WARP_SIZE), row_item_bytes, wire_item_bytes)
    room = max_shared_bytes - _STATIC_BYTES
    num_warps = max(1, min(shape.num_threads // width // WARP_SIZE, room // (2 * of_warp)))
    depth = min(shape.depth, room // (num_warps * of_warp))
    return replace(shape, num_threads=num_warps * WARP_SIZE, depth=max(2, depth))


def _stage_bytes(shape: RingShape, row_item_bytes: int, wire_item_bytes: int) -> int:
    """Return the bytes of a stage of all warps of a block: of the wider of rows and partial sums."""
    return shape.num_threads * shape.unroll * _ACCESS_BYTES * max(1, wire_item_bytes // row_item_bytes)


@cache
def combine_type(num_ranks: int) -> type[ctypes.Structure]:
    """``CombineArgs`` of combine_rows.cu."""
    return struct(
        "CombineArgs",
        (comm_type(num_ranks), "comm"),
        (POINTER, "rows out row_to_slots row_weights token_to_ranks"),
        (I32 * (num_ranks + 1), "first_row"),
        (I32, "longest parts sum_parts num_senders"),
    )


def combine_rows(
    launcher: Launcher,
    held: HeldRows,
    rows: RowsAt,
    wire_dtype: torch.dtype,
    out: RowsAt,
    *,
    is_weighted: bool,
    num_sms: int | None,
) -> KernelCall:
    """Sum expert-major rows into the rows of their holders; ``out`` receives this rank's.

    The grid is the number of SMs that it takes.
    """
    weight_bytes = held.weight_bytes if is_weighted else 0
    key = (
        "combine_rows",
        held.first_row,
        held.num_topk,
        weight_bytes,
        rows.hidden,
        rows.dtype,
        wire_dtype,
        out.dtype,
        num_sms,
    )
    prepared = launcher.prepared.use(key) or _prepare(launcher, key)
    row_to_slots, row_weights, token_to_ranks = held.addresses
    return KernelCall(
        prepared,
        {
            "rows": rows.address,
            "out": out.address,
            "row_to_slots": row_to_slots,
            "row_weights": row_weights if is_weighted else 0,
            "token_to_ranks": token_to_ranks,
        },
    )


def _prepare(launcher: Launcher, key: tuple[Any, ...]) -> PreparedLaunch:
    _, first_row, num_topk, weight_bytes, hidden, row_dtype, wire_dtype, out_dtype, num_sms = key
    sms, longest, item_bytes = launcher.sms(num_sms), longest_of(first_row), row_dtype.itemsize
    num_rows, width = longest * launcher.num_ranks, vector_bytes(hidden * item_bytes)
    vectors_per_lane = -(-hidden * item_bytes // (width * WARP_SIZE))
    wanted = combine_shape(num_rows, vectors_per_lane, sms)
    shape = fitting_ring(wanted, launcher.library.max_shared_bytes, item_bytes, wire_dtype.itemsize)
    parts = combine_parts(num_rows, vectors_per_lane)
    grid, of_sum = sms * shape.blocks_per_sm, sum_parts(parts, vectors_per_lane // shape.unroll, sms)
    num_items = longest * ((launcher.num_ranks - 1) * parts + of_sum)
    rounds = num_items * WARP_SIZE / (grid * shape.num_threads)
    arguments = combine_type(launcher.num_ranks)(
        comm=launcher.comm,
        first_row=first_row,
        longest=longest,
        parts=parts,
        sum_parts=of_sum,
        num_senders=combine_senders(rounds, num_rows, sms) if launcher.num_ranks > 1 else 0,
    )
    constants = {
        "NUM_TOPK": num_topk,
        "HIDDEN": hidden,
        "ROW_TYPE": ELEMENT_TYPES[row_dtype],
        "WIRE_TYPE": ELEMENT_TYPES[wire_dtype],
        "OUT_TYPE": ELEMENT_TYPES[out_dtype],
        "WEIGHT_BYTES": weight_bytes,
        "VECTOR_ELEMENTS": width // item_bytes,
        "BLOCKS_PER_SM": shape.blocks_per_sm,
        "UNROLL": shape.unroll,
        "DEPTH": shape.depth,
    }
    shared_bytes = shape.depth * _stage_bytes(shape, item_bytes, wire_dtype.itemsize)
    return launcher.prepare(
        key, constants, arguments, grid=grid, num_threads=shape.num_threads, shared_bytes=shared_bytes
    )
