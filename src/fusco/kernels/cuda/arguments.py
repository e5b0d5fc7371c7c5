"""The structs that kernels take by value, field by field as in ``source``, which checks their sizes."""

from __future__ import annotations

import ctypes
from functools import cache

_U32, _I32, _U64 = ctypes.c_uint32, ctypes.c_int32, ctypes.c_uint64
_POINTER = ctypes.c_uint64  # as an integer, so that torch's addresses fit without a cast


class Failure(ctypes.Structure):
    """``Failure`` of comm.cuh: the first wait that ran out."""

    _fields_ = [(name, _U32) for name in ("is_set", "phase", "peer", "expected", "seen")]


class Report(ctypes.Structure):
    """``Report`` of plan.cu: what came of a plan."""

    _fields_ = [
        ("ticket", _U32),
        *((name, _I32) for name in ("num_slots", "bad_src", "bad_token", "bad_k", "bad_id")),
        ("bad_ticket", _U32),
        *((name, _I32) for name in ("overflow_needed", "overflow_limit")),
    ]


class CopyArgs(ctypes.Structure):
    """``CopyArgs`` of copy_segments.cu."""

    _fields_ = [
        *((name, _POINTER) for name in ("src", "dst", "segments")),
        *((name, ctypes.c_int64) for name in ("num_segments", "piece_bytes")),
    ]


class WeightArgs(ctypes.Structure):
    """``WeightArgs`` of weight_gradients.cu."""

    _fields_ = [*((name, _POINTER) for name in ("grads", "rows", "weights", "dots")), ("num_rows", ctypes.c_int64)]


class ForwardingArgs(ctypes.Structure):
    """``ForwardingArgs`` of plan_forwarding.cu."""

    _fields_ = [
        *((name, _POINTER) for name in ("topk_idx", "expert_to_node", "node_to_tokens", "token_to_place", "summary")),
        *((name, _I32) for name in ("num_tokens", "num_experts", "num_nodes", "own_node")),
    ]


@cache
def gather_type(num_messages: int) -> type[ctypes.Structure]:
    """``GatherArgs`` of gather_rows.cu."""
    fields = [
        ("rows", _POINTER),
        *((name, _POINTER * num_messages) for name in ("messages", "places")),
        ("first_row", _I32 * (num_messages + 1)),
    ]
    return type("GatherArgs", (ctypes.Structure,), {"_fields_": fields})


@cache
def returned_type(num_remote: int) -> type[ctypes.Structure]:
    """``ReturnedArgs`` of add_returned.cu."""
    fields = [
        ("own", _POINTER),
        *((name, _POINTER * num_remote) for name in ("returned", "places")),
        ("out", _POINTER),
        ("num_tokens", _I32),
    ]
    return type("ReturnedArgs", (ctypes.Structure,), {"_fields_": fields})


@cache
def comm_type(num_ranks: int) -> type[ctypes.Structure]:
    """``Comm`` of comm.cuh."""
    sections = (
        "routing_ready",
        "rows_released",
        "sums_released",
        "rows_ready",
        "sums_ready",
        "ids",
        "weights",
        "sums",
    )
    fields = [
        ("arena", _POINTER * num_ranks),
        ("state", _POINTER),
        ("failure", _POINTER),
        ("abort", _POINTER),
        ("timeout_ns", _U64),
        *((name, _U64) for name in sections),
        *((name, _I32) for name in ("rank", "max_tokens", "max_chunks", "max_topk")),
    ]
    return type("Comm", (ctypes.Structure,), {"_fields_": fields})


@cache
def plan_type(num_ranks: int, num_nodes: int = 1) -> type[ctypes.Structure]:
    """``PlanArgs`` of plan.cu."""
    num_sources = num_ranks * num_nodes
    tables = ("expert_to_local", "expert_to_rank")
    made = ("row_to_slots", "row_weights", "num_rows_per_expert", "block_to_first_slot", "token_to_ranks")
    fields = [
        ("comm", comm_type(num_ranks)),
        *((name, _POINTER * num_nodes) for name in ("topk_idx", "topk_weights")),
        *((name, _POINTER) for name in (*tables, *made, "run_counts", "report")),
        ("first_row", _I32 * (num_sources + 1)),
        ("publishers", _I32 * num_sources),
        *((name, _I32 * num_nodes) for name in ("published", "held")),
        *((name, _I32) for name in ("num_experts", "num_local_experts", "expert_alignment")),
        *((name, _I32) for name in ("max_slots", "is_overflow_reported")),
        ("ticket", _U32),
    ]
    return type("PlanArgs", (ctypes.Structure,), {"_fields_": fields})


@cache
def stage_type(num_ranks: int, num_payloads: int) -> type[ctypes.Structure]:
    """``StageArgs`` of stage_rows.cu."""
    fields = [
        ("comm", comm_type(num_ranks)),
        ("payloads", _POINTER * num_payloads),
        ("pools", _POINTER * num_payloads),
        ("row_bytes", _U64 * num_payloads),
        ("num_tokens", _I32),
    ]
    return type("StageArgs", (ctypes.Structure,), {"_fields_": fields})


@cache
def scatter_type(num_ranks: int, num_payloads: int) -> type[ctypes.Structure]:
    """``ScatterArgs`` of scatter_rows.cu."""
    fields = [
        ("comm", comm_type(num_ranks)),
        ("rows", _POINTER * num_payloads * num_ranks),
        ("outputs", _POINTER * num_payloads),
        *((name, _POINTER) for name in ("row_to_slots", "block_to_first_slot", "num_rows_per_expert")),
        ("first_row", _I32 * (num_ranks + 1)),
        *((name, _I32) for name in ("num_local_experts", "longest", "parts")),
        ("in_place_ranks", _U32),
    ]
    return type("ScatterArgs", (ctypes.Structure,), {"_fields_": fields})


@cache
def combine_type(num_ranks: int) -> type[ctypes.Structure]:
    """``CombineArgs`` of combine_rows.cu."""
    fields = [
        ("comm", comm_type(num_ranks)),
        *((name, _POINTER) for name in ("rows", "out", "row_to_slots", "row_weights", "token_to_ranks")),
        ("first_row", _I32 * (num_ranks + 1)),
        *((name, _I32) for name in ("longest", "parts")),
    ]
    return type("CombineArgs", (ctypes.Structure,), {"_fields_": fields})
