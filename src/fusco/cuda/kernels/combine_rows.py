"""The kernel ``combine_rows``: send partial sums to the holders of rows, and add them there."""

from __future__ import annotations

import ctypes
from functools import cache

import torch

from fusco.cuda.kernels.abi import ELEMENT_TYPES, I32, MAX_PARTS, POINTER, address, vector_bytes
from fusco.cuda.kernels.comm import comm_type
from fusco.cuda.kernels.held_rows import HeldRows
from fusco.cuda.kernels.launcher import Launcher
from fusco.cuda.tuning import combine_shape


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
    held: HeldRows,
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
    sms = launcher.sms(num_sms)
    shape = combine_shape(sms)
    weights = held.weights if is_weighted else None
    arguments = combine_type(launcher.num_ranks)(
        comm=launcher.comm,
        rows=rows.data_ptr(),
        out=out.data_ptr(),
        row_to_slots=held.row_to_slots.data_ptr(),
        row_weights=address(weights),
        token_to_ranks=held.token_to_ranks.data_ptr(),
        first_row=held.first_row,
        longest=held.longest,
        parts=held.num_parts,
    )
    hidden, item_bytes = rows.shape[1], rows.element_size()
    constants = {
        "NUM_TOPK": held.row_to_slots.shape[1],
        "HIDDEN": hidden,
        "ROW_TYPE": ELEMENT_TYPES[rows.dtype],
        "WIRE_TYPE": ELEMENT_TYPES[wire_dtype],
        "OUT_TYPE": ELEMENT_TYPES[out.dtype],
        "WEIGHT_BYTES": 0 if weights is None else weights.element_size(),
        "VECTOR_ELEMENTS": vector_bytes(hidden * item_bytes) // item_bytes,
        "MAX_PARTS": MAX_PARTS,
        "BLOCKS_PER_SM": shape.blocks_per_sm,
        "UNROLL": shape.unroll,
    }
    launcher.launch("combine_rows", constants, arguments, grid=sms * shape.blocks_per_sm, num_threads=shape.num_threads)
    return sms
