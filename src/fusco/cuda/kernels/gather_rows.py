"""The kernel ``gather_rows``: pack rows into messages for other nodes."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

from fusco.cuda.kernels.abi import I32, POINTER, Number, struct, vector_bytes
from fusco.cuda.kernels.launcher import KernelCall, Launcher, PreparedLaunch
from fusco.cuda.tuning import GATHER_SMS, GATHER_THREADS


@cache
def gather_type(num_messages: int) -> type[ctypes.Structure]:
    """``GatherArgs`` of gather_rows.cu."""
    return struct(
        "GatherArgs",
        (POINTER, "rows"),
        (POINTER * num_messages, "messages places"),
        (I32 * (num_messages + 1), "first_row"),
    )


class Part(NamedTuple):
    """Rows for one message: the addresses of int32 places of rows, and of the message, and the number of both.

    A negative place leaves its row of the message as it is.
    """

    places: Number
    message: Number
    num_rows: int


def gather_rows(launcher: Launcher, rows: Number, size: int, parts: Sequence[Part]) -> KernelCall | None:
    """Pack rows into messages: for each part ``rows[places[i]]``, in order of ``i``, into the front of its bytes.

    ``rows`` is the address of contiguous rows of ``size`` bytes; rows and messages are aligned to 16 bytes, or to the
    widest access that divides a row. There are as many parts in every call, some may be empty. Returns ``None`` if
    there is nothing to pack.
    """
    first_row = (0, *itertools.accumulate(part.num_rows for part in parts))
    if not (first_row[-1] and size):
        return None
    key = ("gather_rows", size, first_row)
    prepared = launcher.prepared.use(key) or _prepare(launcher, key)
    messages, places = [part.message for part in parts], [part.places for part in parts]
    return KernelCall(prepared, {"rows": rows, "messages": messages, "places": places})


def _prepare(launcher: Launcher, key: tuple[Any, ...]) -> PreparedLaunch:
    _, size, first_row = key
    num_messages = len(first_row) - 1
    arguments = gather_type(num_messages)(first_row=first_row)
    constants = {"NUM_MESSAGES": num_messages, "ROW_BYTES": size, "VECTOR_BYTES": vector_bytes(size)}
    grid = min(first_row[-1], GATHER_SMS)
    return launcher.prepare(key, constants, arguments, grid=grid, num_threads=GATHER_THREADS)
