"""The kernel ``stage_rows``: copy this rank's rows into the pool, which peers read."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

from fusco.cuda.kernels.abi import CHUNK_ROWS, I32, POINTER, U64, Payload
from fusco.cuda.kernels.comm import comm_type
from fusco.cuda.kernels.launcher import Launcher, PreparedLaunch
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
    grid = max(1, min(stage_sms(num_sms) if num_sms else launcher.sms(stage_sms(None)), num_chunks))
    key = ("stage_rows", grid, *(payload.row_bytes for payload in payloads))
    prepared = launcher.prepared.get(key) or _prepare(launcher, key)
    arguments = prepared.arguments
    prepared.set_table("payloads", [payload.address for payload in payloads])
    prepared.set_table("pools", pools)
    arguments.num_tokens = num_tokens
    prepared.launch(launcher.stream)
    return grid


def _prepare(launcher: Launcher, key: tuple[Any, ...]) -> PreparedLaunch:
    _, grid, *row_bytes = key
    arguments = stage_type(launcher.num_ranks, len(row_bytes))(comm=launcher.comm, row_bytes=tuple(row_bytes))
    constants = {"NUM_PAYLOADS": len(row_bytes), "CHUNK_ROWS": CHUNK_ROWS}
    return launcher.prepare(key, constants, arguments, grid=grid, num_threads=STAGE_THREADS)
