"""The kernel ``gather_rows``: pack rows into messages for other nodes."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch

from fusco.core.rows import row_bytes
from fusco.cuda.kernels.abi import I32, POINTER, vector_bytes
from fusco.cuda.kernels.launcher import Launcher
from fusco.cuda.tuning import GATHER_SMS, GATHER_THREADS


@cache
def gather_type(num_messages: int) -> type[ctypes.Structure]:
    """``GatherArgs`` of gather_rows.cu."""
    fields = [
        ("rows", POINTER),
        *((name, POINTER * num_messages) for name in ("messages", "places")),
        ("first_row", I32 * (num_messages + 1)),
    ]
    return type("GatherArgs", (ctypes.Structure,), {"_fields_": fields})


class Part(NamedTuple):
    """Rows for one message: the addresses of int32 places of rows, and of the message, and the number of both.

    A negative place leaves its row of the message as it is.
    """

    places: int
    message: int
    num_rows: int


def gather_rows(launcher: Launcher, rows: torch.Tensor, parts: Sequence[Part]) -> None:
    """Pack rows into messages: for each part ``rows[places[i]]``, in order of ``i``, into the front of its bytes.

    Args:
        launcher: the rank's launcher.
        rows: contiguous; rows and messages are aligned to 16 bytes, or to the widest access that divides a row.
        parts: the same number in every call, some may be empty.
    """
    size = row_bytes(rows)
    first_row = (0, *itertools.accumulate(part.num_rows for part in parts))
    if not (first_row[-1] and size):
        return
    arguments = gather_type(len(parts))(
        rows=rows.data_ptr(),
        messages=tuple(part.message for part in parts),
        places=tuple(part.places for part in parts),
        first_row=first_row,
    )
    constants = {"NUM_MESSAGES": len(parts), "ROW_BYTES": size, "VECTOR_BYTES": vector_bytes(size)}
    grid = min(first_row[-1], GATHER_SMS)
    launcher.launch("gather_rows", constants, arguments, grid=grid, num_threads=GATHER_THREADS)
