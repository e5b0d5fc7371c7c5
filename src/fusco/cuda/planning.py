"""Planning on the device: the kernel's launch, the one wait for the output's size, and invalid expert ids."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import torch

from fusco.core.errors import RejectedInputError, Stall
from fusco.cuda.context import CudaContext
from fusco.cuda.device_plan import DevicePlan
from fusco.cuda.failure import own_backlog
from fusco.cuda.kernels.abi import Memory
from fusco.cuda.kernels.plan import PlanTerms, PublishedRouting, plan_slots
from fusco.engine.base import DispatchRequest
from fusco.planner.routing import Routing, describe_invalid_id

_Plan = TypeVar("_Plan", bound=DevicePlan)

_NO_LIMIT = 2**31 - 1
_CLAMPED = 2**31 - 1  # the kernel clamps ids outside int32 to +-(2**31 - 1)


class DevicePlanner:
    """Makes the plans of one rank, in order."""

    def __init__(self, context: CudaContext) -> None:
        self._context, self._arena, self._placement = context, context.arena, context.placement
        self._reached_plan = torch.cuda.Event()  # unused between nodes: there the host has waited already
        self._num_plans = 0

    def begin(self, stream: torch.cuda.Stream) -> None:
        """Record an event ahead of the next plan: until it completes, no peer is to blame for a wait."""
        self._reached_plan.record(stream)

    def make_plan(
        self,
        plan_type: Callable[..., _Plan],
        request: DispatchRequest,
        routing: Sequence[tuple[Memory, Memory | None]],
        num_rows: Sequence[int],
        stream: torch.cuda.Stream,
        held: Sequence[int] = (),
    ) -> _Plan:
        """Plan on the device.

        Args:
            plan_type: constructor that takes the fields of ``DevicePlan``.
            request: the dispatch.
            routing: ids and weights that this rank publishes: its own, then those of its counterparts on other nodes.
            num_rows: rows of each source on this node.
            stream: the stream to launch on.
            held: sources whose rows this rank forwards.

        """
        arena, device, rank = self._arena, self._arena.device, self._arena.rank
        topology = arena.layout.topology
        first_row = (0, *itertools.accumulate(num_rows))
        counterparts = [topology.node_to_ranks[node][arena.local] for node in topology.remote_nodes(rank)]
        weights = request.routing.topk_weights
        num_local, shape = len(self._placement.rank_to_experts[rank]), (first_row[-1], request.routing.num_topk)
        plan = plan_type(
            rank=rank,
            placement=self._placement,
            first_row=first_row,
            held=(rank, *held),
            num_slots=request.static.num_rows if request.static else 0,
            row_to_slots=torch.empty(shape, dtype=torch.int32, device=device),
            weights=None if weights is None else torch.empty(shape, dtype=weights.dtype, device=device),
            num_rows_per_expert=torch.empty(num_local, dtype=torch.int64, device=device),
            block_to_first_slot=torch.empty(num_local + 1, dtype=torch.int32, device=device),
            token_to_ranks=torch.empty(
                sum(num_rows[source] for source in (rank, *held)), dtype=torch.int32, device=device
            ),
        )
        self._num_plans += 1
        published = [
            PublishedRouting(source=source, topk_idx=ids, topk_weights=of_source)
            for source, (ids, of_source) in zip((rank, *counterparts), routing, strict=True)
        ]
        terms = PlanTerms(
            expert_alignment=request.expert_alignment,
            max_slots=request.static.num_rows if request.static else _NO_LIMIT,
            is_overflow_reported=request.static is not None and request.static.on_overflow == "raise",
            ticket=0 if request.static else self._num_plans,
        )
        with self._context.timeline.span("plan", "slots"):
            launcher = self._context.launcher(stream)
            plan_slots(launcher, self._context.tables, plan, published, terms, request.launch.num_sms)
        return plan

    def size_exactly(self, plan: _Plan) -> _Plan:
        """Wait for the plan, and return it with its number of slots, the only value that the host needs."""
        report, ticket = self._arena.report, self._num_plans
        peers = tuple(rank for rank in self._arena.node_ranks if rank != self._arena.rank)

        def stall() -> Stall:
            if not self._reached_plan.query():
                return own_backlog("the plan")
            return Stall("planning on the device", peers, "the plan", "none yet")

        self._context.watchdog.wait_until(lambda: report.ticket == ticket, stall)
        return replace(plan, num_slots=report.num_slots)

    def rejection_of(self, routing: Routing) -> Exception | None:
        """Return the error of an invalid expert id in the latest plan: ``ValueError`` on its rank, else a rejection.

        ``Engine.pending_error`` returns those of earlier plans, into static rows.
        """
        report = self._arena.report
        src = report.bad_src
        if src < 0 or report.bad_ticket != self._num_plans:
            return None
        report.bad_src = -1
        token, k, bad_id = report.bad_token, report.bad_k, report.bad_id
        if src == self._arena.rank and abs(bad_id) == _CLAMPED:
            bad_id = int(routing.topk_idx[token, k])
        reason = describe_invalid_id(token, k, bad_id, self._placement.num_experts)
        if src == self._arena.rank:
            return ValueError(reason)
        return RejectedInputError(f"dispatch was cancelled on all ranks, since rank {src} rejected its input: {reason}")
