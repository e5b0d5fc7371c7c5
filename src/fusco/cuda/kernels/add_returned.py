"""The kernel ``add_returned``: the last step of combine between nodes."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch

from fusco.cuda.kernels.abi import ELEMENT_TYPES, I32, POINTER, Number, RowsAt, struct, vector_bytes
from fusco.cuda.kernels.comm import comm_type
from fusco.cuda.kernels.launcher import KernelCall, Launcher, PreparedLaunch
from fusco.cuda.tuning import ADD_RETURNED_BLOCKS_PER_SM as BLOCKS_PER_SM, ADD_RETURNED_THREADS as NUM_THREADS

_TOKENS_PER_BLOCK = NUM_THREADS // 32


@cache
def returned_type(num_ranks: int, num_remote: int) -> type[ctypes.Structure]:
    """``ReturnedArgs`` of add_returned.cu."""
    return struct(
        "ReturnedArgs",
        (comm_type(num_ranks), "comm"),
        (POINTER, "own"),
        (POINTER * num_remote, "returned places"),
        (POINTER, "out"),
        (I32, "num_tokens"),
    )


class ReturnedSums(NamedTuple):
    """Sums of this rank's tokens: addresses of them, and for each other node of the int32 place of each token."""

    rows: Sequence[Number]
    places: Sequence[Number]
    dtype: torch.dtype


def add_returned(
    launcher: Launcher, own: Number, returned: ReturnedSums, out: RowsAt, num_tokens: int
) -> KernelCall | None:
    """Set ``out[t]`` to the sum of ``own[t]`` and, for each other node, ``returned[place of t]``; see the twin.

    ``own`` is the address of rows of the dtype in which those of ``out`` are accumulated. Returns ``None`` without
    tokens.
    """
    if not num_tokens:
        return None
    key = ("add_returned", num_tokens, out.hidden, out.dtype, returned.dtype, len(returned.rows))
    prepared = launcher.prepared.use(key) or _prepare(launcher, key)
    fields = {"own": own, "out": out.address, "returned": returned.rows, "places": returned.places}
    return KernelCall(prepared, fields)


def _prepare(launcher: Launcher, key: tuple[Any, ...]) -> PreparedLaunch:
    _, num_tokens, hidden, row_dtype, wire_dtype, num_remote = key
    arguments = returned_type(launcher.num_ranks, num_remote)(comm=launcher.comm, num_tokens=num_tokens)
    constants = {
        "NUM_REMOTE": num_remote,
        "HIDDEN": hidden,
        "ROW_TYPE": ELEMENT_TYPES[row_dtype],
        "WIRE_TYPE": ELEMENT_TYPES[wire_dtype],
        "VECTOR_ELEMENTS": vector_bytes(hidden * row_dtype.itemsize) // row_dtype.itemsize,
    }
    grid = min(-(-num_tokens // _TOKENS_PER_BLOCK), launcher.library.num_sms * BLOCKS_PER_SM)
    return launcher.prepare(key, constants, arguments, grid=grid, num_threads=NUM_THREADS)
