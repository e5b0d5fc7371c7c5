"""The kernel ``scatter_rows``: pull rows of all ranks of the node into their slots on this rank."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache

from fusco.cuda.kernels.abi import CHUNK_ROWS, I32, POINTER, U32, Payload, vector_bytes
from fusco.cuda.kernels.comm import comm_type
from fusco.cuda.kernels.held_rows import HeldRows
from fusco.cuda.kernels.launcher import Launcher
from fusco.cuda.kernels.plan import PlannedRows
from fusco.cuda.tuning import SCATTER_THREADS, SCATTER_UNROLL, scatter_sms, stage_sms


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
    held: HeldRows,
    payloads: Sequence[Payload],
    rows: Sequence[Sequence[int]],
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
        rows: ``rows[r][p]`` is the address of payload ``p`` of the rows that rank ``r`` holds.
        in_place_ranks: bit ``r`` is set if rank ``r`` does not stage its rows.
        clears_padding: True to set the slots between blocks to zero.
        num_sms: a budget of SMs, shared with staging.

    Returns the number of SMs that it takes.

    """
    num_ranks = launcher.num_ranks
    wanted = num_sms or scatter_sms(num_ranks)
    if num_sms and is_staged(launcher, in_place_ranks):
        wanted -= stage_sms(num_sms)
    row_type = ctypes.c_uint64 * len(payloads)
    arguments = scatter_type(num_ranks, len(payloads))(
        comm=launcher.comm,
        rows=tuple(row_type(*of_rank) for of_rank in rows),
        outputs=tuple(payload.output_address for payload in payloads),
        row_to_slots=held.row_to_slots.data_ptr(),
        block_to_first_slot=plan.block_to_first_slot.data_ptr(),
        num_rows_per_expert=plan.num_rows_per_expert.data_ptr(),
        first_row=held.first_row,
        num_local_experts=len(plan.num_rows_per_expert) if clears_padding else 0,
        num_slots=plan.num_slots,
        longest=held.longest,
        parts=held.num_parts,
        in_place_ranks=in_place_ranks,
    )
    constants = {
        "NUM_TOPK": plan.num_topk,
        "NUM_PAYLOADS": len(payloads),
        "PAYLOAD_BYTES": ",".join(str(payload.row_bytes) for payload in payloads),
        "VECTOR_BYTES": ",".join(str(vector_bytes(payload.row_bytes)) for payload in payloads),
        "CHUNK_ROWS": CHUNK_ROWS,
        "UNROLL": SCATTER_UNROLL,
    }
    grid = launcher.sms(max(1, wanted))
    launcher.launch("scatter_rows", constants, arguments, grid=grid, num_threads=SCATTER_THREADS, is_dependent=True)
    return grid


def is_staged(launcher: Launcher, in_place_ranks: int) -> bool:
    """Return whether this rank's rows are staged."""
    return not in_place_ranks >> launcher.comm.rank & 1
