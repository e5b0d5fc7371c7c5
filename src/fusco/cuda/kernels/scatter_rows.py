"""The kernel ``scatter_rows``: write this rank's rows to their slots, here and on the other ranks of the node."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch

from fusco.cuda.kernels.abi import I32, I64, POINTER, U64, WARP_SIZE, Memory, Payload, struct, vector_bytes
from fusco.cuda.kernels.comm import comm_type
from fusco.cuda.kernels.held_rows import HeldRows, longest_of
from fusco.cuda.kernels.launcher import KernelCall, Launcher, PreparedLaunch
from fusco.cuda.kernels.plan import PlannedRows
from fusco.cuda.tuning import SCATTER_UNROLL, are_streamed, scatter_parts, scatter_senders, scatter_threads


class OwnRouting(NamedTuple):
    """Routing of this rank's rows."""

    topk_idx: Memory  # int32 or int64 (num_tokens, num_topk), contiguous, as the plan publishes it
    expert_to_rank: torch.Tensor  # see ``PlanTables``


class ScatterTerms(NamedTuple):
    """Options of a launch of ``scatter_rows``."""

    clears_padding: bool  # True to set the slots between blocks to zero
    num_sms: int | None  # a budget of SMs; ``None`` means those of the device
    # given if rows are pushed while the launch ahead on the stream, their plan, is made; the plan has
    # ``is_followed_early`` then
    routing: OwnRouting | None = None


@cache
def scatter_type(num_ranks: int, num_payloads: int) -> type[ctypes.Structure]:
    """``ScatterArgs`` of scatter_rows.cu."""
    return struct(
        "ScatterArgs",
        (comm_type(num_ranks), "comm"),
        (POINTER * num_payloads, "rows outputs"),
        (U64 * num_payloads * num_ranks, "received"),
        (POINTER, "row_to_slots token_to_ranks block_to_first_slot num_rows_per_expert topk_idx expert_to_rank"),
        (I64, "num_slots"),
        (I32 * (num_ranks + 1), "first_row"),
        (I32, "num_local_experts longest parts num_senders id_bytes num_experts"),
    )


def scatter_rows(
    launcher: Launcher,
    plan: PlannedRows,
    held: HeldRows,
    payloads: Sequence[Payload],
    received: Sequence[int],
    terms: ScatterTerms,
) -> KernelCall:
    """Write this rank's rows, and those that its peers push, to their slots.

    ``plan`` has the offsets of blocks, ``held`` the rows and their slots, ``payloads`` the rows of this rank and the
    outputs. ``received`` is the offset, in every rank's arena, of each payload of the rows that each rank pushes: all
    payloads of rank 0, then of rank 1, ... The grid is the number of SMs that it takes.
    """
    num_local_experts = plan.tables.shape.num_local_experts if terms.clears_padding else 0
    row_bytes, routing = tuple(payload.row_bytes for payload in payloads), terms.routing
    of_ids = (routing.topk_idx.element_size(), len(routing.expert_to_rank)) if routing else (0, 0)
    key = ("scatter_rows", held.first_row, held.num_topk, num_local_experts, row_bytes, terms.num_sms, of_ids)
    prepared = launcher.prepared.use(key) or _prepare(launcher, key)
    row_to_slots, _, token_to_ranks = held.addresses
    topk_idx, expert_to_rank = (each.data_ptr() for each in routing) if routing else (0, 0)
    return KernelCall(
        prepared,
        {
            "rows": [payload.address for payload in payloads],
            "outputs": [payload.output_address for payload in payloads],
            "received": received,
            "row_to_slots": row_to_slots,
            "token_to_ranks": token_to_ranks,
            "block_to_first_slot": plan.tables.address_of("block_to_first_slot"),
            "num_rows_per_expert": plan.tables.address_of("num_rows_per_expert"),
            "num_slots": payloads[0].num_output_rows,
            "topk_idx": topk_idx,
            "expert_to_rank": expert_to_rank,
        },
    )


def _prepare(launcher: Launcher, key: tuple[Any, ...]) -> PreparedLaunch:
    _, first_row, num_topk, num_local_experts, row_bytes, num_sms, (id_bytes, num_experts) = key
    longest, grid = longest_of(first_row), launcher.sms(num_sms)
    vectors_per_lane = max(-(-size // (vector_bytes(size) * WARP_SIZE)) for size in row_bytes)
    num_rows, num_threads = longest * launcher.num_ranks, scatter_threads(grid)
    parts = scatter_parts(num_rows, vectors_per_lane)
    arguments = scatter_type(launcher.num_ranks, len(row_bytes))(
        comm=launcher.comm,
        first_row=first_row,
        num_local_experts=num_local_experts,
        longest=longest,
        parts=parts,
        num_senders=scatter_senders(num_rows * parts * WARP_SIZE / (grid * num_threads), grid),
        id_bytes=id_bytes,
        num_experts=num_experts,
    )
    constants = {
        "NUM_TOPK": num_topk,
        "NUM_PAYLOADS": len(row_bytes),
        "PAYLOAD_BYTES": ",".join(map(str, row_bytes)),
        "VECTOR_BYTES": ",".join(str(vector_bytes(size)) for size in row_bytes),
        "UNROLL": SCATTER_UNROLL,
        # the rows of this rank's experts, if routing is uniform
        "IS_STREAMED": int(are_streamed(longest * num_topk, sum(row_bytes))),
        "IS_EARLY": int(id_bytes > 0),
    }
    return launcher.prepare(key, constants, arguments, grid=grid, num_threads=num_threads, is_dependent=True)
