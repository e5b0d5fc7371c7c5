"""The kernel ``scatter_rows``: pull rows of all ranks of the node into their slots on this rank."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

from fusco.cuda.kernels.abi import CHUNK_ROWS, I32, MAX_PARTS, POINTER, U32, Payload, vector_bytes
from fusco.cuda.kernels.comm import comm_type
from fusco.cuda.kernels.held_rows import Rows, longest_of
from fusco.cuda.kernels.launcher import Launcher, PreparedLaunch
from fusco.cuda.kernels.plan import PlannedRows
from fusco.cuda.tuning import SCATTER_THREADS, SCATTER_UNROLL, parts_of_row, scatter_sms, stage_sms


@cache
def scatter_type(num_ranks: int, num_payloads: int) -> type[ctypes.Structure]:
    """``ScatterArgs`` of scatter_rows.cu."""
    fields = [
        ("comm", comm_type(num_ranks)),
        ("rows", POINTER * num_payloads * num_ranks),
        ("outputs", POINTER * num_payloads),
        *((name, POINTER) for name in ("row_to_slots", "block_to_first_slot", "num_rows_per_expert")),
        ("first_row", I32 * (num_ranks + 1)),
        *((name, I32) for name in ("num_local_experts", "num_slots", "longest", "parts")),
        ("in_place_ranks", U32),
    ]
    return type("ScatterArgs", (ctypes.Structure,), {"_fields_": fields})


def scatter_rows(
    launcher: Launcher,
    plan: PlannedRows,
    held: Rows,
    payloads: Sequence[Payload],
    rows: Sequence[int],
    *,
    in_place_ranks: int,
    clears_padding: bool,
    num_sms: int | None,
) -> int:
    """Pull rows into their slots.

    Args:
        launcher: the rank's launcher.
        plan: has the offsets of blocks.
        held: the rows and their slots.
        payloads: ``address`` is not used.
        rows: the address of each payload of the rows that each rank holds: all payloads of rank 0, then of rank 1, ...
        in_place_ranks: bit ``r`` is set if rank ``r`` does not stage its rows.
        clears_padding: True to set the slots between blocks to zero.
        num_sms: a budget of SMs, shared with staging.

    Returns the number of SMs that it takes.
    """
    first_row, num_local_experts = held.first_row, plan.tables.num_local_experts if clears_padding else 0
    row_bytes = tuple(payload.row_bytes for payload in payloads)
    key = ("scatter_rows", first_row, held.num_topk, num_local_experts, row_bytes, in_place_ranks, num_sms)
    prepared = launcher.prepared.get(key) or _prepare(launcher, key)
    arguments = prepared.arguments
    prepared.set_table("rows", rows)
    prepared.set_table("outputs", [payload.output_address for payload in payloads])
    arguments.row_to_slots = held.addresses.row_to_slots
    arguments.block_to_first_slot = plan.tables.address_of_blocks
    arguments.num_slots = payloads[0].num_output_rows
    arguments.num_rows_per_expert = plan.tables.address_of_counts
    prepared.launch(launcher.stream)
    return prepared.grid


def _prepare(launcher: Launcher, key: tuple[Any, ...]) -> PreparedLaunch:
    _, first_row, num_topk, num_local_experts, row_bytes, in_place_ranks, num_sms = key
    wanted = num_sms or scatter_sms(launcher.num_ranks)
    if num_sms and is_staged(launcher, in_place_ranks):
        wanted -= stage_sms(num_sms)
    longest = longest_of(first_row)
    arguments = scatter_type(launcher.num_ranks, len(row_bytes))(
        comm=launcher.comm,
        first_row=first_row,
        num_local_experts=num_local_experts,
        longest=longest,
        parts=parts_of_row(longest * launcher.num_ranks, MAX_PARTS),
        in_place_ranks=in_place_ranks,
    )
    constants = {
        "NUM_TOPK": num_topk,
        "NUM_PAYLOADS": len(row_bytes),
        "PAYLOAD_BYTES": ",".join(map(str, row_bytes)),
        "VECTOR_BYTES": ",".join(str(vector_bytes(size)) for size in row_bytes),
        "CHUNK_ROWS": CHUNK_ROWS,
        "UNROLL": SCATTER_UNROLL,
    }
    grid = launcher.sms(max(1, wanted))
    return launcher.prepare(key, constants, arguments, grid=grid, num_threads=SCATTER_THREADS, is_dependent=True)


def is_staged(launcher: Launcher, in_place_ranks: int) -> bool:
    """Return whether this rank's rows are staged."""
    return not in_place_ranks >> launcher.comm.rank & 1
