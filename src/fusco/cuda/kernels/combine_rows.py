"""The kernel ``combine_rows``: send partial sums to the holders of rows, and add them there."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch

from fusco.cuda.kernels.abi import ELEMENT_TYPES, I32, MAX_PARTS, POINTER, vector_bytes
from fusco.cuda.kernels.comm import comm_type
from fusco.cuda.kernels.held_rows import Rows, longest_of
from fusco.cuda.kernels.launcher import Launcher, PreparedLaunch
from fusco.cuda.tuning import combine_shape, parts_of_row


@cache
def combine_type(num_ranks: int) -> type[ctypes.Structure]:
    """``CombineArgs`` of combine_rows.cu."""
    fields = [
        ("comm", comm_type(num_ranks)),
        *((name, POINTER) for name in ("rows", "out", "row_to_slots", "row_weights", "token_to_ranks")),
        ("first_row", I32 * (num_ranks + 1)),
        *((name, I32) for name in ("longest", "parts")),
    ]
    return type("CombineArgs", (ctypes.Structure,), {"_fields_": fields})


def combine_rows(
    launcher: Launcher,
    held: Rows,
    rows: torch.Tensor,
    wire_dtype: torch.dtype,
    out: torch.Tensor,
    *,
    is_weighted: bool,
    num_sms: int | None,
) -> int:
    """Sum expert-major rows into the rows of their holders; ``out`` receives this rank's.

    Returns the number of SMs that it takes.
    """
    weight_bytes = held.weight_bytes if is_weighted else 0
    hidden = rows.shape[1]
    key = (
        "combine_rows",
        held.first_row,
        held.num_topk,
        weight_bytes,
        hidden,
        rows.dtype,
        wire_dtype,
        out.dtype,
        num_sms,
    )
    prepared = launcher.prepared.get(key) or _prepare(launcher, key)
    arguments = prepared.arguments
    arguments.rows, arguments.out = rows.data_ptr(), out.data_ptr()
    arguments.row_to_slots, weights, arguments.token_to_ranks = held.addresses
    arguments.row_weights = weights if is_weighted else 0
    prepared.launch(launcher.stream)
    return launcher.sms(num_sms)


def _prepare(launcher: Launcher, key: tuple[Any, ...]) -> PreparedLaunch:
    _, first_row, num_topk, weight_bytes, hidden, row_dtype, wire_dtype, out_dtype, num_sms = key
    sms = launcher.sms(num_sms)
    shape, longest = combine_shape(sms), longest_of(first_row)
    arguments = combine_type(launcher.num_ranks)(
        comm=launcher.comm,
        first_row=first_row,
        longest=longest,
        parts=parts_of_row(longest * launcher.num_ranks, MAX_PARTS),
    )
    constants = {
        "NUM_TOPK": num_topk,
        "HIDDEN": hidden,
        "ROW_TYPE": ELEMENT_TYPES[row_dtype],
        "WIRE_TYPE": ELEMENT_TYPES[wire_dtype],
        "OUT_TYPE": ELEMENT_TYPES[out_dtype],
        "WEIGHT_BYTES": weight_bytes,
        "VECTOR_ELEMENTS": vector_bytes(hidden * row_dtype.itemsize) // row_dtype.itemsize,
        "MAX_PARTS": MAX_PARTS,
        "BLOCKS_PER_SM": shape.blocks_per_sm,
        "UNROLL": shape.unroll,
    }
    grid = sms * shape.blocks_per_sm
    return launcher.prepare(key, constants, arguments, grid=grid, num_threads=shape.num_threads)
