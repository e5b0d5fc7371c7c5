"""The kernel ``add_returned``: the last step of combine between nodes."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache

import torch

from fusco.core.rows import accumulation_dtype
from fusco.cuda.kernels.abi import ELEMENT_TYPES, I32, POINTER, vector_bytes
from fusco.cuda.kernels.comm import comm_type
from fusco.cuda.kernels.launcher import Launcher
from fusco.cuda.tuning import ADD_RETURNED_BLOCKS_PER_SM as BLOCKS_PER_SM
from fusco.cuda.tuning import ADD_RETURNED_THREADS as NUM_THREADS

_TOKENS_PER_BLOCK = NUM_THREADS // 32


@cache
def returned_type(num_ranks: int, num_remote: int) -> type[ctypes.Structure]:
    """``ReturnedArgs`` of add_returned.cu."""
    fields = [
        ("comm", comm_type(num_ranks)),
        ("own", POINTER),
        *((name, POINTER * num_remote) for name in ("returned", "places")),
        ("out", POINTER),
        ("num_tokens", I32),
    ]
    return type("ReturnedArgs", (ctypes.Structure,), {"_fields_": fields})


def add_returned(
    launcher: Launcher,
    own: torch.Tensor,
    returned: Sequence[torch.Tensor],
    places: Sequence[torch.Tensor],
    out: torch.Tensor,
) -> None:
    """Set ``out[t]`` to the sum of ``own[t]`` and, for each other node, ``returned[place of t]``; see the twin."""
    num_tokens, hidden = out.shape
    if not num_tokens:
        return
    arguments = returned_type(launcher.num_ranks, len(returned))(
        comm=launcher.comm,
        own=own.data_ptr(),
        returned=tuple(rows.data_ptr() for rows in returned),
        places=tuple(of_node.data_ptr() for of_node in places),
        out=out.data_ptr(),
        num_tokens=num_tokens,
    )
    assert own.dtype == accumulation_dtype(out.dtype), (own.dtype, out.dtype)
    constants = {
        "NUM_REMOTE": len(returned),
        "HIDDEN": hidden,
        "ROW_TYPE": ELEMENT_TYPES[out.dtype],
        "WIRE_TYPE": ELEMENT_TYPES[returned[0].dtype],
        "VECTOR_ELEMENTS": vector_bytes(hidden * out.element_size()) // out.element_size(),
    }
    grid = min(-(-num_tokens // _TOKENS_PER_BLOCK), launcher.library.num_sms * BLOCKS_PER_SM)
    launcher.launch("add_returned", constants, arguments, grid=grid, num_threads=NUM_THREADS)
