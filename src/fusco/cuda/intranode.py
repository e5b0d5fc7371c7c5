"""Within a node: planning, pulling rows into their slots, and summing them up again, as kernels on one stream."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import TypeVar

import torch

from fusco.control.fingerprint import Agreement, Record
from fusco.control.session import Rounds
from fusco.control.watchdog import Watch
from fusco.core.errors import RejectedInputError, Stall
from fusco.core.launch import Launch
from fusco.core.placement import ExpertPlacement
from fusco.core.rows import aligned, row_bytes
from fusco.core.timeline import NO_TIMELINE, NoTimeline, Timeline
from fusco.cuda.arena import Arena
from fusco.cuda.context import Kernels
from fusco.cuda.device_plan import DevicePlan
from fusco.cuda.failure import own_backlog
from fusco.cuda.kernels.held_rows import HeldRows
from fusco.cuda.kernels.payload import Payload
from fusco.cuda.kernels.plan import PlanTerms, PublishedRouting
from fusco.engine.base import DispatchOrder
from fusco.planner.routing import Routing, describe_stranger

_Plan = TypeVar("_Plan", bound=DevicePlan)

_NO_LIMIT = 2**31 - 1
STAGED = (-1, 0)  # where rows are that peers read in the pool
_NARROWED = 2**31 - 1  # what the plan's kernel makes of a larger id, and less than none of a smaller one


class NodeShuffle:
    """What one rank does for rows that stand in the memory of its node's ranks."""

    def __init__(
        self, arena: Arena, kernels: Kernels, placement: ExpertPlacement, rounds: Rounds, watch: Watch
    ) -> None:
        self.arena, self.kernels, self.placement, self.rounds, self.watch = arena, kernels, placement, rounds, watch
        self.timeline: Timeline | NoTimeline = NO_TIMELINE
        self.staging_stream = torch.cuda.Stream(arena.device)
        self._may_stage, self._has_staged = torch.cuda.Event(), torch.cuda.Event()
        self._has_come_to_plan = torch.cuda.Event()  # between nodes the host has waited so far anyway
        self._num_plans = 0

    def dispatch(
        self, agreement: Agreement, order: DispatchOrder, stream: torch.cuda.Stream
    ) -> tuple[DevicePlan, list[torch.Tensor], Exception | None]:
        """Plan and move rows, where there is one node only; the last is what was wrong with somebody's routing."""
        payloads, routing = list(map(aligned, order.payloads)), order.routing
        with self.spend("planning"):
            records = self.rounds.publish(agreement, [routing.num_tokens, *self.place_of(payloads)])
        if not order.static:
            self._has_come_to_plan.record(stream)
        with self.staging(payloads, records, order.launch, stream):
            with self.spend("planning"):
                published = [(routing.topk_idx.contiguous(), travelling_weights(routing))]
                num_rows = [record.counts[0] for record in records]
                plan = self.make_plan(DevicePlan, order, published, num_rows)
                if not order.static:
                    plan = self.size_exactly(plan)
            with self.spend("wire"):
                rows = self.scatter_own(plan, plan.rows, payloads, records, order.launch)
        return plan, rows, None if order.static else self.rejection_of(routing)

    def dispatch_along(
        self,
        agreement: Agreement,
        plan: DevicePlan,
        payloads: Sequence[torch.Tensor],
        launch: Launch,
        stream: torch.cuda.Stream,
    ) -> list[torch.Tensor]:
        """Move rows along an earlier plan."""
        payloads = list(map(aligned, payloads))
        records = self.rounds.publish(agreement, [plan.num_tokens, *self.place_of(payloads)])
        with self.staging(payloads, records, launch, stream), self.spend("wire"):
            return self.scatter_own(plan, plan.rows, payloads, records, launch)

    def combine(
        self,
        plan: DevicePlan,
        rows: torch.Tensor,
        wire_dtype: torch.dtype,
        launch: Launch,
        stream: torch.cuda.Stream,
        *,
        is_weighted: bool,
    ) -> torch.Tensor:
        """Sum rows."""
        out = rows.new_empty(plan.num_tokens, rows.shape[1])
        with self.timeline.span("sum", "tokens", stream):
            self.kernels.combine(plan.rows, rows, wire_dtype, out, is_weighted=is_weighted, num_sms=launch.num_sms)
        return out

    def spend(self, kind: str) -> AbstractContextManager[None]:
        """See ``CallProfile.spend``."""
        return self.rounds.profile.spend(kind)

    def place_of(self, payloads: Sequence[torch.Tensor]) -> tuple[int, int]:
        """Where peers find the rows: in a buffer that they see, or in the pool."""
        return self.arena.place_of(payloads[0]) if len(payloads) == 1 and payloads[0].numel() else STAGED

    def _is_staged(self, record: Record) -> bool:
        """Whether a rank of this node copies its rows to where peers read them; with no peers nobody reads them."""
        return record.counts[1] == STAGED[0] and len(self.arena.node_ranks) > 1

    def make_plan(
        self,
        plan_type: Callable[..., _Plan],
        order: DispatchOrder,
        routing: Sequence[tuple[torch.Tensor, torch.Tensor | None]],
        num_rows: Sequence[int],
        held: Sequence[int] = (),
    ) -> _Plan:
        """Plan on the device.

        Args:
            plan_type: takes the fields of ``DevicePlan``.
            order: what is dispatched.
            routing: ids and weights that this rank publishes: its own, then those of its counterparts on other nodes.
            num_rows: of each source on this node.
            held: sources whose rows this rank forwards.

        """
        arena, device, rank = self.arena, self.arena.device, self.arena.rank
        topology = arena.layout.topology
        first_row = (0, *itertools.accumulate(num_rows))
        counterparts = [topology.node_to_ranks[node][arena.local] for node in topology.remote_nodes(rank)]
        weights = order.routing.topk_weights
        num_local, shape = len(self.placement.rank_to_experts[rank]), (first_row[-1], order.routing.num_topk)
        plan = plan_type(
            rank=rank,
            placement=self.placement,
            first_row=first_row,
            held=(rank, *held),
            num_slots=order.static.num_slots if order.static else 0,
            row_to_slots=torch.empty(shape, dtype=torch.int32, device=device),
            weights=None if weights is None else torch.empty(shape, dtype=weights.dtype, device=device),
            num_rows_per_expert=torch.empty(num_local, dtype=torch.int64, device=device),
            block_to_first_slot=torch.empty(num_local + 1, dtype=torch.int32, device=device),
            token_to_ranks=torch.empty(
                sum(num_rows[source] for source in (rank, *held)), dtype=torch.int32, device=device
            ),
        )
        self._num_plans += 1
        with self.timeline.span("plan", "slots"):
            self.kernels.plan(
                plan,
                [
                    PublishedRouting(source=source, topk_idx=ids, topk_weights=of_source)
                    for source, (ids, of_source) in zip((rank, *counterparts), routing, strict=True)
                ],
                PlanTerms(
                    expert_alignment=order.expert_alignment,
                    max_slots=order.static.num_slots if order.static else _NO_LIMIT,
                    is_overflow_reported=order.static is not None and order.static.on_overflow == "raise",
                    ticket=0 if order.static else self._num_plans,
                ),
                order.launch.num_sms,
            )
        return plan

    def size_exactly(self, plan: _Plan) -> _Plan:
        """Wait until the plan is made, for the one number that the host needs."""
        report, ticket = self.arena.report, self._num_plans
        peers = tuple(rank for rank in self.arena.node_ranks if rank != self.arena.rank)

        def stall() -> Stall:
            if not self._has_come_to_plan.query():
                return own_backlog("the plan")
            return Stall("planning on the device", peers, "the plan", "none yet")

        self.watch.wait_until(lambda: report.ticket == ticket, stall)
        return replace(plan, num_slots=report.num_slots)

    def rejection_of(self, routing: Routing) -> Exception | None:
        """What is wrong with an id that is no expert: for whoever gave it a ``ValueError``, and all others know.

        Of the latest plan, that is. What an earlier one found, into static slots, is told by ``Engine.pending_error``.
        """
        report = self.arena.report
        src = report.bad_src
        if src < 0 or report.bad_ticket != self._num_plans:
            return None
        report.bad_src = -1
        token, k, bad_id = report.bad_token, report.bad_k, report.bad_id
        if src == self.arena.rank and abs(bad_id) == _NARROWED:
            bad_id = int(routing.topk_idx[token, k])
        reason = describe_stranger(token, k, bad_id, self.placement.num_experts)
        if src == self.arena.rank:
            return ValueError(reason)
        return RejectedInputError(
            f"dispatch was called off on all ranks, since rank {src} rejected its input: {reason}"
        )

    @contextmanager
    def staging(
        self, payloads: Sequence[torch.Tensor], records: Sequence[Record], launch: Launch, stream: torch.cuda.Stream
    ) -> Iterator[None]:
        """Copy rows to where peers read them, beside what is launched inside; rows in place stay where they are."""
        if not self._is_staged(records[self.arena.rank]):
            yield
            return
        with self.spend("staging"):
            moved = [Payload(address=payload.data_ptr(), row_bytes=row_bytes(payload)) for payload in payloads]
            num_tokens, sizes = len(payloads[0]), [payload.row_bytes for payload in moved]
            offsets = [self.arena.layout.pool_offset(num_tokens, sizes, p) for p in range(len(moved))]
            pools = [self.arena.address(self.arena.local, 0, offset) for offset in offsets]
            self._may_stage.record(stream)
            self.staging_stream.wait_event(self._may_stage)
            with self.timeline.span("stage", "own rows", self.staging_stream):
                self.kernels.stage(moved, pools, num_tokens, launch.num_sms, self.staging_stream.cuda_stream)
        yield
        self._has_staged.record(self.staging_stream)
        stream.wait_event(self._has_staged)

    def scatter_own(
        self,
        plan: DevicePlan,
        held: HeldRows,
        payloads: Sequence[torch.Tensor],
        records: Sequence[Record],
        launch: Launch,
    ) -> list[torch.Tensor]:
        """Make the outputs, and fill them from the tokens of this node's ranks."""
        outputs = [payload.new_empty(plan.num_slots, *payload.shape[1:]) for payload in payloads]
        moved = [
            Payload(address=payload.data_ptr(), row_bytes=row_bytes(payload), output_address=output.data_ptr())
            for payload, output in zip(payloads, outputs, strict=True)
        ]
        sizes = [payload.row_bytes for payload in moved]
        rows, in_place_ranks = [], 0
        for local, rank in enumerate(self.arena.node_ranks):
            num_tokens, buffer, offset = records[rank].counts[:3]
            if local == self.arena.local:
                rows.append([payload.address for payload in moved])
            elif not self._is_staged(records[rank]):
                rows.append([self.arena.address(local, buffer, offset)])
            else:
                starts = [self.arena.layout.pool_offset(num_tokens, sizes, p) for p in range(len(sizes))]
                rows.append([self.arena.address(local, 0, start) for start in starts])
            in_place_ranks |= (not self._is_staged(records[rank])) << local
        with self.timeline.span("scatter", "own rows"):
            self.kernels.scatter(
                plan,
                held,
                moved,
                rows,
                in_place_ranks=in_place_ranks,
                clears_padding=True,
                num_sms=launch.num_sms,
            )
        return outputs


def travelling_weights(routing: Routing) -> torch.Tensor | None:
    """Weights as they are sent, contiguous."""
    return None if routing.topk_weights is None else routing.topk_weights.detach().contiguous()
