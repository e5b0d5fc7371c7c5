"""Program of a dispatch between nodes whose rows are one slice of known size, all on the caller's stream."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from fusco.core.errors import Stall
from fusco.core.profile import CallProfile
from fusco.core.rows import row_bytes
from fusco.cuda.between_nodes.message_rows import MessageRows, RoutingMessages, first_messages
from fusco.cuda.between_nodes.nccl import num_bytes_of
from fusco.cuda.between_nodes.network import Network, SpareEvents
from fusco.cuda.between_nodes.plan import InternodePlan, own_runs, runs_of_slice
from fusco.cuda.between_nodes.slice_sender import SliceSender, forwarded_starts, num_rows_per_slice
from fusco.cuda.between_nodes.sum_program import InternodeSumProgram
from fusco.cuda.context import CudaContext
from fusco.cuda.kernels.abi import MemoryAt, Value
from fusco.cuda.kernels.plan import PlanMemory, PlanTensors
from fusco.cuda.kernels.plan_forwarding import (
    ForwardingAddresses,
    ForwardingMemory,
    ForwardingTerms,
    PackedForwarding,
    message_bytes,
    plan_forwarding,
)
from fusco.cuda.kernels.program import TICKET, Program, Step, record_event
from fusco.cuda.kernels.spares import SpareLimit
from fusco.cuda.within_node.device_plan import DevicePlan
from fusco.cuda.within_node.own_rows import OwnRows
from fusco.cuda.within_node.planning import DevicePlanner, PlanSizes
from fusco.cuda.within_node.programs import DispatchProgram, Outputs, Routed, address_of, rows_of_values
from fusco.engine.base import DispatchRequest, LateRejection
from fusco.planner.internode import InternodeTraffic

_PATIENCE_MS = 2.0  # of compiled code for a plan, which comes after messages
_MAX_EARLY = 4  # dispatches with memory for a combine since the latest combine; handles without one would keep theirs


@dataclass(frozen=True)
class DispatchMaker:
    """Makes programs of dispatches."""

    context: CudaContext
    planner: DevicePlanner
    own_rows: OwnRows
    sender: SliceSender
    network: Network
    message_rows: MessageRows
    routing_memory: torch.Tensor  # memory for the routing that all programs send and receive, uint8 (2, ...)
    spare_limit: SpareLimit

    def make(
        self,
        request: DispatchRequest,
        traffic: InternodeTraffic,
        sizes: PlanSizes,
        terms: ForwardingTerms,
        num_slots: int | None,
        stream: torch.cuda.Stream,
    ) -> InternodeDispatchProgram | None:
        """Return the program of a dispatch; ``None`` unless it is one slice of rows that follow each other."""
        of, payloads, ids = InternodeDispatchProgram, request.payloads, request.routing.topk_idx
        row_sizes = list(map(row_bytes, payloads))
        rows_per_slice = num_rows_per_slice(self.context.layout, traffic, sum(row_sizes))
        plan = sizes.at(Value(of.TABLES))
        own = plan.run_of(own_runs(traffic, plan), traffic.local)
        if traffic.num_slices(rows_per_slice) != 1 or traffic.is_shared or own is None:
            return None
        of_others = plan.run_of(runs_of_slice(traffic, 0, rows_per_slice), traffic.local)
        if of_others is None:
            return None
        weight_bytes = sizes.shape.weight_bytes
        routing = self._routing(request, traffic, message_bytes(terms, ids.shape, weight_bytes))
        if not (routing.sends or routing.receives):
            return None
        forwarding = ForwardingAddresses(Value(of.FORWARDING), self.context.topology.num_nodes, len(ids))
        weights = MemoryAt(Value(of.WEIGHTS), weight_bytes) if weight_bytes else None
        published = MemoryAt(Value(of.IDS), ids.element_size()), weights
        packing = plan_forwarding(
            self.context.launcher(stream),
            published,
            ids.shape,
            self.context.expert_to_node,
            self.message_rows.summary,
            terms,
            PackedForwarding(forwarding, self.routing_memory.data_ptr()),
            Value(of.NUMBER),
        )
        given = [(Value(of.FIRST_ROW + i), size) for i, size in enumerate(row_sizes)]
        packed = self.sender.pack(given, forwarding, traffic, 0, stream)
        starts = forwarded_starts(self.context.arena, traffic, row_sizes)
        receives = self.sender.receives(traffic, starts, row_sizes, 0)
        sends = [*packed.sends, *routing.sends]
        messages = self.network.prepare(sends, [*receives, *routing.receives], "slice 0", stream)
        arrival = [record_event(self.context.library, stream.cuda_stream, Value(of.EVENT))] if request.static else []
        planning = self.planner.call(plan, request, [published, *routing.received], stream, TICKET)
        num_sms, first_output = request.launch.num_sms, of.FIRST_ROW + len(payloads)
        rows = rows_of_values(payloads, of.FIRST_ROW, first_output, Value(of.NUM_SLOTS))
        forwarded = [payload._replace(address=start) for payload, start in zip(rows, starts, strict=True)]
        scatters = [self.own_rows.call(plan, own, rows, stream, num_sms)]
        scatters.append(self.own_rows.call(plan, of_others, forwarded, stream, num_sms, clears_padding=False))
        until_plan: list[Step] = [packing, *packed.gathers, *messages.calls, *arrival, planning]
        together: list[list[Step]] = [[*until_plan, *scatters]]
        if num_slots is None:
            together = [until_plan, [*scatters]]
        handle, report, num_values = stream.cuda_stream, self.context.arena.report_address, first_output + len(payloads)
        programs = [Program(each, num_values, handle, report, _PATIENCE_MS) for each in together]
        counts = num_bytes_of(packed.sends), num_bytes_of(routing.sends), max(each.grid for each in scatters)
        return InternodeDispatchProgram(
            self, programs, request, traffic, sizes, num_slots, stream, counts, messages.stall
        )

    def _routing(self, request: DispatchRequest, traffic: InternodeTraffic, num_bytes: int) -> RoutingMessages:
        """Return messages of routing in the memory of all programs, of so many bytes to each node."""
        sent, received = self.routing_memory
        packed = first_messages(sent, len(traffic.destinations), num_bytes)
        return RoutingMessages(request.routing, packed, traffic, received)


class InternodeDispatchProgram(DispatchProgram):
    """See ``DispatchProgram``; all is on one stream.

    Attributes:
        combine: the program of the latest combine that has followed.
        num_early: dispatches since then that have allocated memory for another one.
    """

    TABLES, NUM_SLOTS, IDS, WEIGHTS, FORWARDING, NUMBER, EVENT, FIRST_ROW = range(1, 9)

    def __init__(  # noqa: PLR0913, PLR0917  what one dispatch has in common with the next
        self,
        maker: DispatchMaker,
        programs: Sequence[Program],
        request: DispatchRequest,
        traffic: InternodeTraffic,
        sizes: PlanSizes,
        num_slots: int | None,
        stream: torch.cuda.Stream,
        counts: tuple[int, int, int],
        stall: Stall,
    ) -> None:
        """``counts`` are bytes of rows and of routing that it sends, and its SMs."""
        device = maker.context.arena.device
        super().__init__(
            maker.planner,
            programs,
            PlanMemory(sizes.shape, device, maker.spare_limit),
            maker.planner.fields_of(sizes, request.static, stream),
            num_slots,
            is_static=request.static is not None,
            outputs=Outputs(request.payloads, device),
            num_sms=counts[-1],
        )
        self.combine: InternodeSumProgram | None = None
        self.num_early = 0
        self._reference = weakref.ref(self)  # a handle must not keep a communicator's memory
        self._network, self._message_rows, self._stall = maker.network, maker.message_rows, stall
        self._traffic = traffic
        self._stream, self._events = stream, SpareEvents()
        self._shape, self._row_bytes = request.routing.topk_idx.shape, sum(map(row_bytes, request.payloads))
        sizes_of_forwarding = maker.context.topology.num_nodes, self._shape[0]
        self._forwardings = ForwardingMemory(device, sizes_of_forwarding, maker.spare_limit)
        self._num_empty, self._sent_bytes = 0, counts[:2]

    def outputs(self) -> list[torch.Tensor] | None:
        """See ``DispatchProgram``; ``None`` if rows should be counted."""
        if not (self.is_static or self._message_rows.are_few_empty(self._shape, self._row_bytes)):
            return None
        return super().outputs()

    def run(self, outputs: list[torch.Tensor], payloads: Sequence[torch.Tensor], routed: Routed) -> DevicePlan:
        if not self.is_static:
            self._message_rows.next_ticket()
        return super().run(outputs, payloads, routed)

    def launch(
        self,
        outputs: Sequence[torch.Tensor],
        payloads: Sequence[torch.Tensor],
        routed: Routed,
        tables: PlanTensors | None = None,
        capture: int = 0,
    ) -> InternodePlan:
        """See ``DispatchProgram``; the number of the dispatch is the latest of ``MessageRows``."""
        topk_idx, weights, _ = routed
        ticket, forwarding = self._planner.next_ticket(), self._forwardings.take()
        tables = tables or self._memory.take()
        number = 0 if self.is_static else self._message_rows.ticket
        event = self._events.take(self._stream) if self.is_static else None
        rows = *map(address_of, payloads), *map(address_of, outputs or payloads)  # as in ``DispatchProgram``
        values = (
            *(0 if self.is_static else ticket, tables.address, self.num_slots or 0),
            *(topk_idx.data_ptr(), 0 if weights is None else weights.data_ptr(), forwarding.address, number),
            *(event.cuda_event if event else 0, *rows),
        )
        is_done = event.query if event else partial(self._planner.is_reported, ticket)
        let_go = partial(self._events.give_back, event) if event else None
        self._network.launch(partial(self._programs[0].launch, *values), self._stall, is_done, let_go)
        given = tables, *self._of_plan, self.num_slots or 0, capture
        plan = InternodePlan(*given, traffic=self._traffic, forwarding=forwarding)
        plan.made_by = self._reference
        return plan

    def launch_rows(
        self, plan: DevicePlan, outputs: Sequence[torch.Tensor], payloads: Sequence[torch.Tensor], _routed: Routed
    ) -> None:
        addresses = map(address_of, (*payloads, *outputs))
        unused = (0,) * (self.EVENT - self.NUM_SLOTS)
        self._programs[1].launch(0, plan.tables.address, plan.num_slots, *unused, *addresses)

    def finish(self, plan: Any, outputs: Sequence[torch.Tensor], topk_idx: torch.Tensor) -> None:
        if not self.is_static:
            self._forwardings.refill()
            if self.combine and self.num_early < _MAX_EARLY:
                self.num_early += 1
                self.combine.expect(plan)
        super().finish(plan, outputs, topk_idx)
        if not self.is_static:
            plan.num_empty_rows = self._num_empty = self._message_rows.num_empty(self._shape, self._message_rows.ticket)
            if overflow := self._message_rows.pending_error():
                raise LateRejection(overflow)

    def count(self, profile: CallProfile) -> None:
        super().count(profile)
        profile.internode_row_bytes += self._sent_bytes[0]
        profile.internode_metadata_bytes += self._sent_bytes[1]
        profile.internode_empty_bytes = self._num_empty * self._row_bytes
