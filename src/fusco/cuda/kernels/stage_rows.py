"""The kernel ``stage_rows``: copy this rank's rows into the pool, which peers read."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache

from fusco.cuda.kernels.abi import CHUNK_ROWS, I32, POINTER, U64, Payload
from fusco.cuda.kernels.comm import comm_type
from fusco.cuda.kernels.launcher import Launcher
from fusco.cuda.tuning import STAGE_THREADS, stage_sms


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


def stage_rows(
    launcher: Launcher, payloads: Sequence[Payload], pools: Sequence[int], num_tokens: int, num_sms: int | None
) -> int:
    """Copy rows into the pool; leaves most of a budget of SMs to ``scatter_rows``.

    Returns the number of SMs that it takes.
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
    grid = max(1, min(stage_sms(num_sms) if num_sms else launcher.sms(stage_sms(None)), num_chunks))
    launcher.launch("stage_rows", constants, arguments, grid=grid, num_threads=STAGE_THREADS)
    return grid
