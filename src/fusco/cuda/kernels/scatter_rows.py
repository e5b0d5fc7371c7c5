"""The kernel ``scatter_rows``: write this rank's rows to their slots, here and on the other ranks of the node."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache

from fusco.cuda.kernels.abi import I32, MAX_PARTS, POINTER, U64, WARP_SIZE, Payload, vector_bytes
from fusco.cuda.kernels.comm import comm_type
from fusco.cuda.kernels.held_rows import HeldRows
from fusco.cuda.kernels.launcher import Launcher
from fusco.cuda.kernels.plan import PlannedRows
from fusco.cuda.tuning import SCATTER_UNROLL, scatter_parts, scatter_senders, scatter_threads


@cache
def scatter_type(num_ranks: int, num_payloads: int) -> type[ctypes.Structure]:
    """``ScatterArgs`` of scatter_rows.cu."""
    made = ("row_to_slots", "token_to_ranks", "block_to_first_slot", "num_rows_per_expert")
    fields = [
        ("comm", comm_type(num_ranks)),
        *((name, POINTER * num_payloads) for name in ("rows", "outputs")),
        ("received", U64 * num_payloads * num_ranks),
        *((name, POINTER) for name in made),
        ("first_row", I32 * (num_ranks + 1)),
        *((name, I32) for name in ("num_local_experts", "longest", "parts", "num_senders")),
    ]
    return type("ScatterArgs", (ctypes.Structure,), {"_fields_": fields})


def scatter_rows(
    launcher: Launcher,
    plan: PlannedRows,
    held: HeldRows,
    payloads: Sequence[Payload],
    received: Sequence[Sequence[int]],
    *,
    clears_padding: bool,
    num_sms: int | None,
) -> int:
    """Write this rank's rows, and those that its peers push, to their slots.

    Args:
        launcher: the rank's launcher.
        plan: has the offsets of blocks.
        held: the rows and their slots.
        payloads: the rows of this rank, and the outputs.
        received: ``received[r][p]`` is the offset, in every rank's arena, of payload ``p`` of the rows that rank ``r``
            pushes.
        clears_padding: True to set the slots between blocks to zero.
        num_sms: a budget of SMs.

    Returns the number of SMs that it takes.

    """
    num_ranks, grid = launcher.num_ranks, launcher.sms(num_sms)
    vectors_per_lane = max(of.row_bytes // (vector_bytes(of.row_bytes) * WARP_SIZE) for of in payloads)
    row_type = ctypes.c_uint64 * len(payloads)
    arguments = scatter_type(num_ranks, len(payloads))(
        comm=launcher.comm,
        rows=tuple(payload.address for payload in payloads),
        outputs=tuple(payload.output_address for payload in payloads),
        received=tuple(row_type(*of_rank) for of_rank in received),
        row_to_slots=held.row_to_slots.data_ptr(),
        token_to_ranks=held.token_to_ranks.data_ptr(),
        block_to_first_slot=plan.block_to_first_slot.data_ptr(),
        num_rows_per_expert=plan.num_rows_per_expert.data_ptr(),
        first_row=held.first_row,
        num_local_experts=len(plan.num_rows_per_expert) if clears_padding else 0,
        longest=held.longest,
        parts=scatter_parts(held.longest * num_ranks, vectors_per_lane, MAX_PARTS),
        num_senders=scatter_senders(grid),
    )
    constants = {
        "NUM_TOPK": plan.num_topk,
        "NUM_PAYLOADS": len(payloads),
        "PAYLOAD_BYTES": ",".join(str(payload.row_bytes) for payload in payloads),
        "VECTOR_BYTES": ",".join(str(vector_bytes(payload.row_bytes)) for payload in payloads),
        "UNROLL": SCATTER_UNROLL,
    }
    num_threads = scatter_threads(grid)
    launcher.launch("scatter_rows", constants, arguments, grid=grid, num_threads=num_threads, is_dependent=True)
    return grid
