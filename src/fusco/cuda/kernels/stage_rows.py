"""The kernel ``stage_rows``: own rows into the pool that peers read."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache

from fusco.cuda.kernels.abi import CHUNK_ROWS, I32, POINTER, U64, Payload
from fusco.cuda.kernels.comm import comm_type
from fusco.cuda.kernels.launcher import Launcher

_NUM_THREADS, _NUM_SMS = 512, 16


@cache
def stage_type(num_ranks: int, num_payloads: int) -> type[ctypes.Structure]:
    """``StageArgs`` of stage_rows.cu."""
    fields = [
        ("comm", comm_type(num_ranks)),
        ("payloads", POINTER * num_payloads),
        ("pools", POINTER * num_payloads),
        ("row_bytes", U64 * num_payloads),
        ("num_tokens", I32),
    ]
    return type("StageArgs", (ctypes.Structure,), {"_fields_": fields})


def share_for_staging(launcher: Launcher, num_sms: int | None) -> int:
    """How much of a budget of multiprocessors goes to staging: what fills the pool faster than links empty it.

    Not more, as it runs beside planning and pulling and would only slow them down.
    """
    return max(1, num_sms // 4) if num_sms else launcher.sms(_NUM_SMS)


def stage_rows(
    launcher: Launcher, payloads: Sequence[Payload], pools: Sequence[int], num_tokens: int, num_sms: int | None
) -> int:
    """Copy rows into the pool that peers read; leaves most of a budget of multiprocessors to those that pull.

    Returns how many multiprocessors it takes.
    """
    num_chunks = -(-num_tokens // CHUNK_ROWS)
    arguments = stage_type(launcher.num_ranks, len(payloads))(
        comm=launcher.comm,
        payloads=tuple(payload.address for payload in payloads),
        pools=tuple(pools),
        row_bytes=tuple(payload.row_bytes for payload in payloads),
        num_tokens=num_tokens,
    )
    constants = {"NUM_PAYLOADS": len(payloads), "CHUNK_ROWS": CHUNK_ROWS}
    grid = max(1, min(share_for_staging(launcher, num_sms), num_chunks))
    launcher.launch("stage_rows", constants, arguments, grid=grid, num_threads=_NUM_THREADS)
    return grid
