"""The kernel ``add_returned``: the last step of combine between nodes."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from fusco.core.rows import accumulation_dtype
from fusco.cuda.kernels.abi import ELEMENT_TYPES, I32, POINTER, Memory, struct, vector_bytes
from fusco.cuda.kernels.comm import comm_type
from fusco.cuda.kernels.launcher import Launcher, PreparedLaunch
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


def add_returned(
    launcher: Launcher, own: torch.Tensor, returned: Sequence[torch.Tensor], places: Sequence[Memory], out: torch.Tensor
) -> PreparedLaunch | None:
    """Set ``out[t]`` to the sum of ``own[t]`` and, for each other node, ``returned[place of t]``; see the twin.

    Returns the launch, or ``None`` without tokens.
    """
    num_tokens, hidden = out.shape
    if not num_tokens:
        return None
    assert own.dtype == accumulation_dtype(out.dtype), (own.dtype, out.dtype)
    key = ("add_returned", num_tokens, hidden, out.dtype, returned[0].dtype, len(returned))
    prepared = launcher.prepared.use(key) or _prepare(launcher, key)
    arguments = prepared.arguments
    arguments.own, arguments.out = own.data_ptr(), out.data_ptr()
    prepared.set_table("returned", [rows.data_ptr() for rows in returned])
    prepared.set_table("places", [of_node.data_ptr() for of_node in places])
    prepared.launch(launcher.stream)
    return prepared


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
