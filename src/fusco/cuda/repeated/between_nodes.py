"""Dispatches and combines between nodes, of one slice, that have been made before: compiled code launches all of it."""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from fusco.control.repeated_record import Condition
from fusco.core.config import Launch
from fusco.core.profile import CallProfile
from fusco.core.rows import accumulation_dtype, row_bytes
from fusco.cuda.between_nodes.latest_launches import LatestCombine, LatestDispatch
from fusco.cuda.between_nodes.nccl import Message
from fusco.cuda.between_nodes.network import Network, SpareEvents
from fusco.cuda.between_nodes.plan import InternodePlan
from fusco.cuda.between_nodes.routing_messages import RoutingMessages
from fusco.cuda.between_nodes.shuffle import InternodeShuffle
from fusco.cuda.between_nodes.slice_sender import forwarded_starts, num_rows_per_slice
from fusco.cuda.kernels.combine_rows import combine_fields
from fusco.cuda.kernels.events import record_event, wait_for_event
from fusco.cuda.kernels.gather_rows import Part
from fusco.cuda.kernels.held_rows import RowAddresses
from fusco.cuda.kernels.plan import plan_fields
from fusco.cuda.kernels.plan_forwarding import ForwardingMemory, forwarding_fields
from fusco.cuda.kernels.repeated_launches import CONSTANT, Field, NativeCall, PreparedFields, RepeatedLaunches
from fusco.cuda.kernels.scatter_rows import scatter_fields
from fusco.cuda.repeated.within_node import (
    Repeated,
    RepeatedCalls,
    RepeatedDispatch,
    RepeatedOfPlan,
    Routed,
    is_second,
    of_plan,
    or_none,
)
from fusco.engine.base import CombineRequest, DispatchRequest, LateRejection, RedispatchRequest

_PATIENCE_MS = 2.0  # of compiled code for a plan, which comes after messages
_ALIGNMENT = 16  # of rows, in bytes
_MAX_EARLY_BYTES = 16 << 20  # of memory that a combine may have before it is called: more is in calls that take long
_MAX_EARLY = 4  # dispatches with such memory since the latest combine; handles without a combine would keep theirs


@dataclass(frozen=True, kw_only=True)
class RepeatedInternodeCalls(RepeatedCalls):
    """Makes calls between nodes that can be repeated."""

    network: Network
    shuffle: InternodeShuffle

    def conditions(self) -> list[Condition]:
        """See ``RepeatedCalls``; also that no message of fixed size was too small."""
        overflows = self.shuffle.message_rows.summary.overflow_addresses
        return [*super().conditions(), *(Condition(address, -1, 0) for address in overflows)]

    def keep_dispatch(self, request: DispatchRequest, plan: Any) -> None:
        latest = self.shuffle.latest_dispatch
        circumstances = (latest.counts, plan.stream, request.static, request.launch, latest.terms[:-1])
        is_whole = is_second(request.known, circumstances) and _is_one_slice(plan, latest)
        if request.known and is_whole and self.can_repeat_dispatch(request, plan):
            num_slots = self.num_slots_of(request, plan)
            request.known.repeated = RepeatedInternodeDispatch(self, request, plan, latest, num_slots)

    def keep_redispatch(self, request: RedispatchRequest[Any]) -> None:
        """Prepare nothing."""

    def keep_combine(self, request: CombineRequest[Any]) -> None:
        plan, latest = request.plan, self.shuffle.latest_combine
        circumstances = (*of_plan(plan), plan.traffic, request.launch)
        is_alone = is_second(request.known, circumstances) and len(request.rows) == 1
        is_whole = is_alone and len(latest.sums) == 2 and _is_in_runs(plan)
        if request.known and latest.add and is_whole and self.can_repeat(request.launch, plan, request.rows):
            request.known.repeated = RepeatedInternodeCombine(self, request, latest)


def _is_one_slice(plan: InternodePlan, latest: LatestDispatch) -> bool:
    """Return whether a dispatch has one slice, of known size, and has launched each of its kernels once."""
    launches = [latest.forwarding, latest.plan, *(launched for launched, *_ in latest.gathers), *latest.scatters]
    are_different = len(set(map(id, launches))) == len(launches)
    is_whole = latest.is_alone and latest.terms.max_rows is not None and len(latest.scatters) == 2
    return is_whole and are_different and _is_in_runs(plan)


def _is_in_runs(plan: InternodePlan) -> bool:
    """Return whether rows of this node, and of others, each follow each other in the plan, and none is carried."""
    slices = plan.known_slices
    are_runs = all(len(of) == 1 and of[0].offsets for of in slices)
    return bool(slices) and are_runs and bool(plan.own_rows.offsets) and not plan.traffic.is_shared


def _offsets_in(plan: InternodePlan) -> tuple[RowAddresses, RowAddresses]:
    """Return where the rows of this node are in the plan, and those of other nodes, which are one slice."""
    own, of_others = plan.own_rows.offsets, plan.known_slices[0][0].offsets
    assert own
    assert of_others
    return own, of_others


class RepeatedInternodeDispatch(RepeatedDispatch):
    """See ``RepeatedDispatch``; all is on one stream."""

    def __init__(
        self,
        calls: RepeatedInternodeCalls,
        request: DispatchRequest,
        plan: InternodePlan,
        latest: LatestDispatch,
        num_slots: int | None,
    ) -> None:
        """Prepare the dispatch that has just made a plan; see ``RepeatedDispatch``."""
        assert request.known is not None
        record = calls.record(request.known.fingerprint, latest.counts)
        Repeated.__init__(self, calls, request.launch, record, max(launched.grid for launched in latest.scatters))
        self._keep(calls, request, plan, num_slots)
        self._of_plan["traffic"] = plan.traffic
        self.combine: RepeatedInternodeCombine | None = None  # the latest that has followed
        self.num_early = 0  # dispatches since then that have allocated memory for another one
        self._reference = weakref.ref(self)  # a handle must not keep a communicator's memory
        self._network, self._message_rows, self._events = calls.network, calls.shuffle.message_rows, SpareEvents()
        self._shape, self._row_bytes = request.routing.topk_idx.shape, sum(map(row_bytes, request.payloads))
        self._forwardings, self._num_empty = ForwardingMemory(plan.forwarding, calls.spare_limit), 0
        # The same memory for all repeated calls: a later one is launched later, too.
        routing = RoutingMessages(request.routing, latest.packed, plan.traffic, calls.shuffle.repeated_routing)
        metadata = sum(message.num_bytes for message in routing.sends) + record.internode_bytes
        self._bytes = sum(message.num_bytes for message in latest.sends), metadata
        self._launches = self._prepare(calls, request, plan, latest, routing)

    def _prepare(
        self,
        calls: RepeatedInternodeCalls,
        request: DispatchRequest,
        plan: InternodePlan,
        latest: LatestDispatch,
        routing: RoutingMessages,
    ) -> list[RepeatedLaunches]:
        shape, stream = plan.tables.shape, self._stream.cuda_stream
        # Indices of values, after the ticket.
        memory, num, ids, weights, forwarding, number, event, first = range(1, 9)
        rows = range(first, first + len(request.payloads))
        outputs = range(rows.stop, rows.stop + len(rows))
        sends, receives = [*latest.sends, *routing.sends], [*latest.receives, *routing.receives]
        messages = self._network.prepare(sends, receives, "slice 0", self._stream)
        self._stall = messages.stall
        packing = forwarding_fields(plan.forwarding, forwarding, ids, weights, number)
        packing.append(Field("messages", CONSTANT, routing.memory[0].data_ptr()))
        gathers = [
            (launched, [Field("rows", rows[payload]), *_part_fields(parts, plan.forwarding.address, forwarding)])
            for launched, parts, payload in latest.gathers
        ]
        arrival = [record_event(calls.context.library, stream, value=event)] if request.static else []
        assert latest.plan
        planning = (latest.plan, plan_fields(shape, memory, ids, weights) + _received_fields(routing))
        starts = forwarded_starts(
            calls.context.arena, plan.traffic, [row_bytes(payload) for payload in request.payloads]
        )
        moved = (
            [Field("rows", row, entry=payload) for payload, row in enumerate(rows)],
            [Field("rows", CONSTANT, start, payload) for payload, start in enumerate(starts)],
        )
        scatters: list[PreparedFields | NativeCall] = [
            (launched, of_rows + scatter_fields(shape, memory, outputs, num, run))
            for launched, of_rows, run in zip(latest.scatters, moved, _offsets_in(plan), strict=True)
        ]
        until_plan: list[PreparedFields | NativeCall] = [(latest.forwarding, packing), *gathers]
        until_plan += [*messages.calls, *arrival, planning]
        together = [until_plan + scatters] if self._num_slots is not None else [until_plan, scatters]
        report = calls.context.arena.report_address
        return [RepeatedLaunches(each, outputs.stop, plan.stream, report, _PATIENCE_MS) for each in together]

    def count(self, profile: CallProfile) -> None:
        super().count(profile)
        profile.internode_row_bytes, profile.internode_metadata_bytes = self._bytes
        profile.internode_empty_bytes = self._num_empty * self._row_bytes

    def outputs(
        self,
        payloads: Sequence[torch.Tensor],
        routed: Routed,
        launch: Launch | None,
    ) -> list[torch.Tensor] | None:
        if routed[-1] is None and not self._message_rows.are_few_empty(self._shape, self._row_bytes):
            return None
        return super().outputs(payloads, routed, launch)

    def run(
        self,
        outputs: list[torch.Tensor],
        payloads: Sequence[torch.Tensor],
        routed: Routed,
    ) -> InternodePlan:
        topk_idx, topk_weights, _ = routed
        ticket, tables, forwarding = self._planner.next_ticket(), self._memory.take(), self._forwardings.take()
        is_static, num_slots = self._static is not None, self._num_slots
        number = 0 if is_static else self._message_rows.next_ticket()
        event = self._events.take(self._stream) if is_static else None
        rows = [payload.data_ptr() for payload in payloads]
        known = (
            topk_idx.data_ptr(),
            0 if topk_weights is None else topk_weights.data_ptr(),
            forwarding.address,
            number,
        )
        values = (tables.address, num_slots or 0, *known, event.cuda_event if event else 0, *rows)
        places = [output.data_ptr() for output in outputs] or rows  # no outputs yet: the plan uses no rows
        call = partial(self._launches[0].launch, 0 if is_static else ticket, *values, *places)
        is_done = event.query if event else partial(self._planner.is_reported, ticket)
        let_go = partial(self._events.give_back, event) if event else None
        self._network.launch(call, self._stall, is_done, let_go)
        plan = InternodePlan(num_slots=num_slots or 0, tables=tables, forwarding=forwarding, **self._of_plan)
        plan.made_by = self._reference
        if num_slots is None:
            self._wait_for_size(plan)
            outputs += itertools.starmap(self._allocate, self._arguments_of(plan.num_slots))
            places = [output.data_ptr() for output in outputs]
            self._launches[1].launch(0, tables.address, plan.num_slots, *known, 0, *rows, *places)
        return plan

    def finish(self, plan: Any, outputs: Sequence[torch.Tensor], topk_idx: torch.Tensor) -> None:
        if not self._static:
            self._forwardings.refill()
            if self.combine and self.num_early < _MAX_EARLY:
                self.num_early += 1
                self.combine.expect(plan)
        super().finish(plan, outputs, topk_idx)
        if not self._static:
            plan.num_empty_rows = self._num_empty = self._message_rows.num_empty(self._shape, self._message_rows.ticket)
            if overflow := self._message_rows.pending_error():
                raise LateRejection(overflow)


def _part_fields(parts: Sequence[Part], address: int, forwarding: int) -> list[Field]:
    """Return the fields of a launch of ``gather_rows``; ``address`` is that of the tokens for nodes in the parts."""
    messages = [Field("messages", CONSTANT, part.message, i) for i, part in enumerate(parts)]
    places = [
        Field("places", forwarding, part.places - address, i) if part.num_rows else Field("places", CONSTANT, 0, i)
        for i, part in enumerate(parts)
    ]
    return messages + places


def _received_fields(routing: RoutingMessages) -> list[Field]:
    """Return the fields of a plan that have the routing received from other nodes."""
    fields = []
    for i, (ids, weights) in enumerate(routing.published):
        if i:
            fields.append(Field("topk_idx", CONSTANT, ids.data_ptr(), i))
            fields.append(Field("topk_weights", CONSTANT, weights.data_ptr() if weights else 0, i))
    return fields


class RepeatedInternodeCombine(RepeatedOfPlan):
    """See ``RepeatedCombine``; of one tensor."""

    def __init__(
        self, calls: RepeatedInternodeCalls, request: CombineRequest[InternodePlan], latest: LatestCombine
    ) -> None:
        """Prepare the combine that has just been launched."""
        plan, (rows,) = request.plan, request.rows
        super().__init__(calls, request, latest.sums)
        self._traffic, self._network, self._events = plan.traffic, calls.network, SpareEvents()
        self._num_tokens, self._hidden = plan.num_tokens, rows.shape[1]
        self._out = (self._num_tokens, self._hidden), (self._hidden, 1), rows.dtype
        self._row_bytes = self._hidden * calls.context.wire_dtype(rows.dtype).itemsize
        self._bytes = sum(message.num_bytes for message in latest.sends), self.record.internode_bytes
        self._is_produced = self._events.take(self._stream)
        self._num_empty = 0
        self._launches = self._prepare(calls, request, latest)
        out_bytes = self._num_tokens * self._hidden * rows.dtype.itemsize
        self._is_small = self._scratch_bytes + out_bytes <= _MAX_EARLY_BYTES

    def _prepare(
        self, calls: RepeatedInternodeCalls, request: CombineRequest[InternodePlan], latest: LatestCombine
    ) -> RepeatedLaunches:
        plan, library = request.plan, calls.context.library
        shape, traffic, size = plan.tables.shape, plan.traffic, self._row_bytes
        memory, rows, out, forwarding, scratch, event, num_values = range(1, 8)  # indices of values, after the ticket
        own, of_others = (
            combine_fields(shape, memory, rows, run, is_weighted=request.is_weighted) for run in _offsets_in(plan)
        )
        # Behind this node's sums, those that other nodes return.
        own_bytes = self._num_tokens * self._hidden * accumulation_dtype(self._out[-1]).itemsize
        num_returned = [traffic.num_rows[plan.rank][node] for node in traffic.destinations]
        parts = [own_bytes, *(num_rows * size for num_rows in num_returned)]
        places = list(itertools.accumulate((math.ceil(part / _ALIGNMENT) * _ALIGNMENT for part in parts), initial=0))
        self._scratch_bytes, node_to_place = places[-1], dict(zip(traffic.destinations, places[1:-1], strict=True))
        sent = traffic.sends(0, num_rows_per_slice(calls.context.layout, traffic, size))
        receives = [
            Message(piece.forwarder, node_to_place[piece.node] + piece.first * size, piece.num_rows * size)
            for piece in sent
        ]
        messages = self._network.prepare(latest.sends, receives, "sums of slice 0", self._network.stream, scratch)
        self._stall = messages.stall
        stream, network, produced = plan.stream, self._network.stream.cuda_stream, self._is_produced.cuda_event
        slot = latest.sends[0].address if latest.sends else 0
        added = [Field("own", scratch), Field("out", out)]
        for i, (node, place) in enumerate(node_to_place.items()):
            added.append(Field("returned", scratch, place, i))
            added.append(Field("places", forwarding, plan.forwarding.offset_of_places(node), i))
        assert latest.add
        launches: list[PreparedFields | NativeCall] = [
            (latest.sums[0], [Field("out", CONSTANT, slot), *of_others]),
            record_event(library, stream, produced),
            wait_for_event(library, network, produced),
            *messages.calls,
            record_event(library, network, value=event),
            (latest.sums[1], [Field("out", scratch), *own]),
            wait_for_event(library, stream, value=event),
            (latest.add, added),
        ]
        return RepeatedLaunches(launches, num_values, plan.stream, 0)

    def count(self, profile: CallProfile) -> None:
        super().count(profile)
        profile.internode_row_bytes, profile.internode_metadata_bytes = self._bytes
        profile.internode_empty_bytes = self._num_empty * self._row_bytes

    def _is_of(self, plan: InternodePlan) -> bool:
        return plan.traffic is self._traffic and of_plan(plan) == self._of_plan

    def _new_memory(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return memory for sums of parts, and for the result."""
        return self._allocate((self._scratch_bytes,), (1,), torch.uint8), self._allocate(*self._out)

    def expect(self, plan: InternodePlan) -> None:
        """Allocate memory for a combine that will probably follow a dispatch: meanwhile the host would only wait."""
        if self._is_small and self._is_of(plan) and torch.is_inference_mode_enabled() is self._is_inference:
            plan.allocated = self._of_plan, or_none(self._new_memory)

    def outputs(self, rows: Sequence[torch.Tensor], plan: Any, launch: Launch | None) -> list[torch.Tensor] | None:
        """See ``RepeatedOfPlan``; ahead of the result is memory that ``run`` takes away."""
        if plan.traffic is not self._traffic or not self._is_along(plan, rows, launch):
            return None
        allocated, plan.allocated = plan.allocated, None
        memory = allocated[1] if allocated and allocated[0] is self._of_plan else None
        if memory is None and (memory := or_none(self._new_memory)) is None:
            return None
        return [*memory]

    def run(self, outputs: list[torch.Tensor], rows: Sequence[torch.Tensor], plan: Any) -> None:
        scratch, event = outputs.pop(0), self._events.take(self._stream)
        self._num_empty = plan.num_empty_rows
        if plan.made_by and (dispatch := plan.made_by()):
            dispatch.combine, dispatch.num_early = self, 0
        (y,), (out,) = rows, outputs
        addresses = (plan.tables.address, y.data_ptr(), out.data_ptr(), plan.forwarding.address, scratch.data_ptr())
        call = partial(self._launches.launch, 0, *addresses, event.cuda_event)
        self._network.launch(call, self._stall, event.query, partial(self._events.give_back, event))
