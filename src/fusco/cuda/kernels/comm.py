"""Mirrors of the structs in comm.cuh and of the report in plan.cu."""

from __future__ import annotations

import ctypes
from functools import cache

from fusco.cuda.kernels.abi import I32, POINTER, U32, U64, struct

ABSENT_RANKS = 12  # of State of comm.cuh


class Failure(ctypes.Structure):
    """``Failure`` of comm.cuh: the first wait that timed out or was aborted."""

    _fields_ = [(name, U32) for name in ("is_set", "phase", "peer", "expected", "seen")]


class BadPair(ctypes.Structure):
    """``BadPair`` of plan.cu: an invalid expert id; ``src`` is -1 if there is none."""

    _fields_ = [(name, I32) for name in ("src", "token", "k", "id")]


class Report(ctypes.Structure):
    """``Report`` of plan.cu: the result of a plan for the host."""

    _fields_ = [
        ("ticket", U32),
        ("num_slots", I32),
        ("bad", BadPair),
        ("bad_static", BadPair),
        *((name, I32) for name in ("overflow_needed", "overflow_limit")),
        ("begun", U32),
        ("overflow_expert", I32),
    ]


@cache
def comm_type(num_ranks: int) -> type[ctypes.Structure]:
    """``Comm`` of comm.cuh."""
    return struct(
        "Comm",
        (POINTER * num_ranks, "arena"),
        (POINTER, "state failure abort"),
        (U64, "timeout_ns routing_ready rows_released sums_released node_ready rows_ready"),
        (U64, "sums_ready ids weights received received_bytes"),
        (I32, "rank max_tokens max_topk has_network"),
    )
