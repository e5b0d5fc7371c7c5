"""The kernel ``plan``: assign the rows of a node's ranks to slots on this rank."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch

from fusco.cuda.kernels.abi import CHUNK_PAIRS, I32, POINTER, U32, Memory, address
from fusco.cuda.kernels.comm import comm_type
from fusco.cuda.kernels.launcher import Launcher
from fusco.cuda.tuning import PLAN_PAIRS_PER_BLOCK, PLAN_THREADS

_WARP_SIZE = 32


@dataclass(frozen=True, kw_only=True)
class PublishedRouting:
    """Routing of a source that this rank publishes in its node: ids and weights (num_rows, num_topk), contiguous.

    Ids of this rank are int32 or int64, those of other nodes int32.
    """

    source: int
    topk_idx: Memory
    topk_weights: Memory | None


@dataclass(frozen=True, kw_only=True)
class PlanTables:
    """Tables for all plans of a rank.

    Attributes:
        expert_to_local: int32 (num_experts,), the index among this rank's experts; -1 for experts of other ranks.
        expert_to_rank: int32 (num_experts,), the index in the node; -1 for experts of other nodes.
        publishers: for each source, the rank of the node that publishes its routing.
        num_local_experts: experts of this rank.
        run_counts: int32 (num_sms * num_local_experts,), scratch.
        report: the address of a ``Report``.

    """

    expert_to_local: torch.Tensor
    expert_to_rank: torch.Tensor
    publishers: tuple[int, ...]
    num_local_experts: int
    run_counts: torch.Tensor
    report: int


@dataclass(frozen=True, kw_only=True)
class PlanTerms:
    """Output layout of a plan, and its report.

    Attributes:
        expert_alignment: each block is rounded up to a multiple of this.
        max_slots: slots of the output.
        is_overflow_reported: True if more rows than slots are an error.
        ticket: number of the report; 0 if the host does not wait for it.

    """

    expert_alignment: int
    max_slots: int
    is_overflow_reported: bool
    ticket: int


@dataclass(frozen=True, kw_only=True)
class PlannedRows:
    """A plan as the kernel fills it; a *source* is a rank of any node, its rows are those of its tokens on this node.

    Attributes:
        first_row: ``world_size + 1`` entries; source ``s`` has rows ``first_row[s]`` to ``first_row[s + 1]``. The
            tokens of this node's ranks are all there, of other ranks only those that concern this node.
        held: the sources whose rows are in this rank's pool; this rank first.
        num_slots: rows of the expert-major output.
        row_to_slots, weights: see ``HeldRows``; in order of source.
        token_to_ranks: see ``HeldRows``; in order of ``held``.
        num_rows_per_expert: int64 (num_local_experts,), padding not counted.
        block_to_first_slot: int32 (num_local_experts + 1,).

    """

    first_row: tuple[int, ...]
    held: tuple[int, ...]
    num_slots: int
    row_to_slots: torch.Tensor
    weights: torch.Tensor | None
    num_rows_per_expert: torch.Tensor
    block_to_first_slot: torch.Tensor
    token_to_ranks: torch.Tensor

    @property
    def num_topk(self) -> int:
        """Experts per token (top-k)."""
        return self.row_to_slots.shape[1]


@cache
def plan_type(num_ranks: int, num_nodes: int = 1) -> type[ctypes.Structure]:
    """``PlanArgs`` of plan.cu."""
    num_sources = num_ranks * num_nodes
    tables = ("expert_to_local", "expert_to_rank")
    made = ("row_to_slots", "row_weights", "num_rows_per_expert", "block_to_first_slot", "token_to_ranks")
    fields = [
        ("comm", comm_type(num_ranks)),
        *((name, POINTER * num_nodes) for name in ("topk_idx", "topk_weights")),
        *((name, POINTER) for name in (*tables, *made, "run_counts", "report")),
        ("first_row", I32 * (num_sources + 1)),
        ("publishers", I32 * num_sources),
        *((name, I32 * num_nodes) for name in ("published", "held")),
        *((name, I32) for name in ("num_experts", "num_local_experts", "expert_alignment")),
        *((name, I32) for name in ("max_slots", "is_overflow_reported")),
        ("ticket", U32),
    ]
    return type("PlanArgs", (ctypes.Structure,), {"_fields_": fields})


def plan_shared_bytes(num_local_experts: int) -> int:
    """Return the shared memory of a block in bytes: per expert, a count of each warp, prefix, total, and first slot."""
    return 4 * ((PLAN_THREADS // _WARP_SIZE + 3) * num_local_experts + 1)


def plan_slots(
    launcher: Launcher,
    tables: PlanTables,
    plan: PlannedRows,
    published: Sequence[PublishedRouting],
    terms: PlanTerms,
    num_sms: int | None,
) -> None:
    """Exchange routing within the node and fill the plan's tensors; ``published`` has one entry for each node."""
    num_nodes = len(published)
    arguments = plan_type(launcher.num_ranks, num_nodes)(
        comm=launcher.comm,
        topk_idx=tuple(routing.topk_idx.data_ptr() for routing in published),
        topk_weights=tuple(address(routing.topk_weights) for routing in published),
        expert_to_local=tables.expert_to_local.data_ptr(),
        expert_to_rank=tables.expert_to_rank.data_ptr(),
        row_to_slots=plan.row_to_slots.data_ptr(),
        row_weights=address(plan.weights),
        num_rows_per_expert=plan.num_rows_per_expert.data_ptr(),
        block_to_first_slot=plan.block_to_first_slot.data_ptr(),
        token_to_ranks=plan.token_to_ranks.data_ptr(),
        run_counts=tables.run_counts.data_ptr(),
        report=tables.report,
        first_row=plan.first_row,
        publishers=tables.publishers,
        published=tuple(routing.source for routing in published),
        held=plan.held,
        num_experts=len(tables.expert_to_local),
        num_local_experts=tables.num_local_experts,
        expert_alignment=terms.expert_alignment,
        max_slots=terms.max_slots,
        is_overflow_reported=int(terms.is_overflow_reported),
        ticket=terms.ticket,
    )
    constants = {
        "NUM_NODES": num_nodes,
        "NUM_TOPK": plan.num_topk,
        "ID_BYTES": published[0].topk_idx.element_size(),
        "WEIGHT_BYTES": 0 if plan.weights is None else plan.weights.element_size(),
        "CHUNK_PAIRS": CHUNK_PAIRS,
    }
    num_pairs = plan.first_row[-1] * plan.num_topk
    launcher.launch(
        "plan",
        constants,
        arguments,
        grid=max(1, min(launcher.sms(num_sms), -(-num_pairs // PLAN_PAIRS_PER_BLOCK))),
        num_threads=PLAN_THREADS,
        shared_bytes=plan_shared_bytes(tables.num_local_experts),
    )
