"""Dispatch and combine between nodes: one copy of a row for each node, in slices that overlap packing and network.

A slice passes through three streams. The packing stream gathers rows into a ring slot. The network's stream sends them
into the pool of the node's forwarder. On the caller's stream, all ranks of that node pull them from the pool into their
slots. Tokens of this node are scattered before all others. Combine is the mirror: one sum of a row returns from each
node.

NCCL needs the size of a message at launch. So the host waits in an exactly sized dispatch until the device has counted
the rows for each node, unless messages have a row for each token (``MessageRows``), and for the size of the output, as
within a node. A dispatch into static rows sends messages of a fixed size: a row for each token of the source, or as
many as ``StaticRows.max_rows_to_node`` allows. Rows that no token fills have no expert, and nothing reads them.

Where a dispatch has one slice, nothing can overlap with it, and all of it is on the caller's stream.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, cast

import torch

from fusco.core.errors import MismatchError
from fusco.core.lanes import Groups, Lanes
from fusco.core.profile import Call, CallProfile
from fusco.core.recent import Recent
from fusco.core.rows import aligned, plain, row_bytes
from fusco.cuda.between_nodes.dispatch_program import DispatchMaker, InternodeDispatchProgram
from fusco.cuda.between_nodes.message_rows import MessageRows, RoutingMessages
from fusco.cuda.between_nodes.network import Network
from fusco.cuda.between_nodes.plan import InternodePlan
from fusco.cuda.between_nodes.slice_sender import SliceRing, SliceSender, forwarded_starts, num_rows_per_slice
from fusco.cuda.between_nodes.slice_sums import SliceSums, with_internode_sms
from fusco.cuda.between_nodes.sum_program import InternodeSumProgram, SumMaker
from fusco.cuda.context import CudaContext
from fusco.cuda.kernels.abi import Payload
from fusco.cuda.kernels.plan import PlanShape
from fusco.cuda.kernels.plan_forwarding import (
    ForwardingTensors,
    ForwardingTerms,
    PackedForwarding,
    message_bytes,
    plan_forwarding,
)
from fusco.cuda.kernels.spares import SpareLimit
from fusco.cuda.repeated_calls import RepeatedCalls
from fusco.cuda.within_node.own_rows import OwnRows, Transfer
from fusco.cuda.within_node.planning import DevicePlanner, affordable_bound_of
from fusco.cuda.within_node.programs import narrow, new_outputs, run_dispatch, shapes_of
from fusco.engine.agreed_lanes import PublishedRows, agreed_lanes
from fusco.engine.base import CombineRequest, DispatchOutput, DispatchRequest, LateRejection, Pending, RedispatchRequest
from fusco.planner.balancer import is_builtin
from fusco.planner.internode import InternodeTraffic
from fusco.planner.routing import Routing
from fusco.planner.traffic import Traffic


class InternodeShuffle:
    """Dispatch and combine of one rank where there are several nodes."""

    def __init__(
        self,
        context: CudaContext,
        planner: DevicePlanner,
        own_rows: OwnRows,
        network: Network,
        packing_stream: torch.cuda.Stream,
        repeated_calls: RepeatedCalls | None = None,
    ) -> None:
        self._context, self._planner, self._own_rows, self._network = context, planner, own_rows, network
        self._arena, self._layout, self._topology = context.arena, context.layout, context.topology
        self._ring = SliceRing(network, self._arena)
        self._sender = SliceSender(context, network, self._ring, packing_stream)
        self.message_rows = MessageRows(context)
        overflows = self.message_rows.summary.overflow_addresses
        self._repeated_calls = repeated_calls and replace(repeated_calls, overflows=overflows)
        self._known_traffic: Recent[Any, InternodeTraffic] = Recent(max_size=64)
        self._programs: Recent[tuple[object, ...], Any] = Recent(max_size=256)
        self._sum_maker, self._slice_sums = (
            SumMaker(context, self._ring, network),
            SliceSums(context, self._ring, network),
        )

    @cached_property
    def _dispatch_maker(self) -> DispatchMaker:
        num_bytes, device = self._layout.repeated_routing_bytes // 2, self._arena.device
        routing = torch.empty(2, num_bytes, dtype=torch.uint8, device=device)
        parts = self._context, self._planner, self._own_rows, self._sender, self._network, self.message_rows
        return DispatchMaker(*parts, routing, SpareLimit())

    def pending_error(self) -> Exception | None:
        """Return and clear an error of an earlier plan into static rows, or of a message of fixed size."""
        return self._planner.pending_error() or self.message_rows.pending_error()

    def prepare_dispatch(
        self, request: DispatchRequest, call: Call, stream: torch.cuda.Stream
    ) -> Pending[DispatchOutput[InternodePlan]]:
        """Prepare planning and moving rows; waits until the device has counted them if messages are of their size.

        Then raises ``ValueError`` for an invalid expert id. Otherwise the plan finds it.
        """
        given, weights = request, request.routing.topk_weights
        routing = Routing(request.routing.topk_idx.contiguous(), None if weights is None else plain(weights))
        request = replace(request, launch=with_internode_sms(request.launch), routing=routing)
        terms, payloads = self.message_rows.terms_of(request), list(map(aligned, request.payloads))
        counted = self._launch_forwarding(routing, terms, stream) if terms.max_rows is None else None
        num_rows_to_node = self.message_rows.published(routing, terms)
        if counted and (earlier := self.pending_error()):  # the device has run all earlier calls
            raise earlier

        def run(counts: Sequence[tuple[int, ...]]) -> DispatchOutput[InternodePlan]:
            _require_alike([is_static for is_static, *_ in counts])
            published = [PublishedRows.unpack(of_rank[1:]) for of_rank in counts]
            transfer = Transfer(payloads=payloads, launch=request.launch, stream=stream, call=call)
            with call.profile.spend("planning"):
                traffic = self._traffic(request, published, call)
                on_node = traffic.num_rows_on_node([of_rank.num_tokens for of_rank in published])
                program = None if counted else self._dispatch_program(request, traffic, on_node, terms, stream)
            if program:
                output = self._run(program, request, transfer)
                if self._repeated_calls:
                    self._repeated_calls.keep_dispatch(given, program, counts)
                return output
            forwarding = counted or self._launch_forwarding(routing, terms, stream)
            output = self._dispatch(request, traffic, on_node, forwarding, transfer)
            if not request.static:
                self._complete(request, output.plan, terms, transfer)
            return output

        published = PublishedRows(routing.num_tokens, tuple(num_rows_to_node))
        return Pending([int(request.static is not None), *published.pack()], run)

    def _launch_forwarding(
        self, routing: Routing, terms: ForwardingTerms, stream: torch.cuda.Stream
    ) -> tuple[ForwardingTensors, torch.Tensor]:
        """Launch the plan of what this rank sends to other nodes; return it and the routing of that, packed."""
        num_nodes, ids, weights = self._topology.num_nodes, routing.topk_idx, routing.topk_weights
        num_elements = ForwardingTensors.num_elements(num_nodes, routing.num_tokens)
        memory = ids.new_empty(num_elements, dtype=torch.int32)
        num_bytes = message_bytes(terms, ids.shape, 0 if weights is None else weights.element_size())
        packed = ids.new_empty(num_nodes - 1, num_bytes, dtype=torch.uint8)
        plan = ForwardingTensors(memory, num_nodes, routing.num_tokens)
        with self._context.timeline.span("plan", "rows for each node"):
            plan_forwarding(
                self._context.launcher(stream),
                (ids, weights),
                ids.shape,
                self._context.expert_to_node,
                self.message_rows.summary,
                terms,
                PackedForwarding(plan, packed.data_ptr()),
                terms.ticket,
            ).launch(stream.cuda_stream)
        return plan, packed

    def _dispatch_program(
        self,
        request: DispatchRequest,
        traffic: InternodeTraffic,
        on_node: Sequence[int],
        terms: ForwardingTerms,
        stream: torch.cuda.Stream,
    ) -> InternodeDispatchProgram | None:
        """Return the program of a dispatch of one slice; ``None`` for others, in a capture, and with a timeline."""
        if self._context.is_timed or self._context.gpu.is_capturing():
            return None
        sizes, static = self._planner.sizes_of(request.routing, on_node, traffic.sources), request.static
        bound = static.num_slots(sizes.shape.num_local_experts) if static else self._bound_of(request, sizes.shape)
        options = (request.expert_alignment, static, request.launch.num_sms, bound, terms[:-1])
        of_rows = shapes_of(request.payloads), request.routing.topk_idx.element_size()
        key = ("dispatch", traffic, sizes, *of_rows, *options, stream.cuda_stream, torch.is_inference_mode_enabled())
        known: InternodeDispatchProgram | None = self._programs.use(key)
        if known is None and (known := self._dispatch_maker.make(request, traffic, sizes, terms, bound, stream)):
            self._programs[key] = known
        return known

    def _bound_of(self, request: DispatchRequest, shape: PlanShape) -> int | None:
        sizes = tuple(map(row_bytes, request.payloads))
        return affordable_bound_of(shape, self._topology.world_size, request, sizes) or None

    def _run(
        self, program: InternodeDispatchProgram, request: DispatchRequest, transfer: Transfer
    ) -> DispatchOutput[InternodePlan]:
        payloads, routing = transfer.payloads, request.routing
        rows_per_expert = request.static.rows_per_expert if request.static else None
        outputs = [] if program.num_slots is None else new_outputs(payloads, program.num_slots, rows_per_expert)
        tables, routed = program.new_tables(), (routing.topk_idx, routing.topk_weights, request.static)
        plan = run_dispatch(program, outputs, payloads, routed, transfer.call.profile, tables)
        return DispatchOutput(cast("InternodePlan", plan), outputs)

    def redispatch(
        self, request: RedispatchRequest[InternodePlan], call: Call, stream: torch.cuda.Stream
    ) -> list[torch.Tensor]:
        """Move rows along an earlier plan."""
        plan, payloads = request.plan, list(map(aligned, request.payloads))
        transfer = Transfer(payloads=payloads, launch=with_internode_sms(request.launch), stream=stream, call=call)
        arrivals = list(self._sender.send(transfer, plan.forwarding, plan.traffic))
        rows = self._own_rows.scatter(plan, plan.own_rows, transfer)
        self._scatter_slices(plan, transfer, rows, arrivals, plan.num_slots)
        return rows

    def combine(
        self, request: CombineRequest[InternodePlan], call: Call, stream: torch.cuda.Stream
    ) -> list[torch.Tensor]:
        """Sum rows of each tensor."""
        return [self._combine(request, rows, call, stream) for rows in map(aligned, request.rows)]

    def _combine(
        self, request: CombineRequest[InternodePlan], rows: torch.Tensor, call: Call, stream: torch.cuda.Stream
    ) -> torch.Tensor:
        program = self._sum_program(request, rows, stream)
        if program:
            outputs = program.outputs_like(rows)
            program.run(outputs, [rows], request.plan)
            program.count(call.profile)
            if self._repeated_calls and len(request.rows) == 1:
                self._repeated_calls.keep_along_plan(request, program, request.rows)
            return outputs[0]
        return self._slice_sums.sum(request, rows, stream, call)

    def _sum_program(
        self, request: CombineRequest[InternodePlan], rows: torch.Tensor, stream: torch.cuda.Stream
    ) -> InternodeSumProgram | None:
        """Return the program of a combine of one slice; ``None`` for others, in a capture, and with a timeline."""
        if self._context.is_timed or self._context.gpu.is_capturing():
            return None
        plan, num_sms = request.plan, with_internode_sms(request.launch).num_sms
        of_plan = plan.traffic, plan.first_row, plan.tables.shape, request.is_weighted
        key = ("sums", *of_plan, shapes_of([rows]), num_sms, stream.cuda_stream, torch.is_inference_mode_enabled())
        known: InternodeSumProgram | None = self._programs.use(key)
        if known is None:
            known = self._sum_maker.make(plan, rows, stream, num_sms, is_weighted=request.is_weighted)
            if known:
                self._programs[key] = known
        return known

    def _dispatch(
        self,
        request: DispatchRequest,
        traffic: InternodeTraffic,
        on_node: Sequence[int],
        packed_forwarding: tuple[ForwardingTensors, torch.Tensor],
        transfer: Transfer,
    ) -> DispatchOutput[InternodePlan]:
        """Move rows in slices."""
        stream, profile, (forwarding, packed) = transfer.stream, transfer.call.profile, packed_forwarding
        messages = RoutingMessages(request.routing, packed, traffic)
        profile.internode_metadata_bytes += sum(message.num_bytes for message in messages.sends)
        # Routing travels with the first slice: separate, it would cost the network's latency once more.
        sending = self._sender.send(transfer, forwarding, traffic, (messages.sends, messages.receives))
        with profile.spend("wire"):
            arrivals = list(itertools.islice(sending, 1))
        if arrivals:
            stream.wait_event(arrivals[0])
        plan_type = partial(InternodePlan, traffic=traffic, forwarding=forwarding)
        own = (request.routing.topk_idx, request.routing.topk_weights)
        with profile.spend("planning"):
            plan = self._planner.new_plan(plan_type, request, on_node, stream, traffic.sources)
            self._planner.launch(plan, request, [own, *messages.received], stream)
        with profile.spend("wire"):
            arrivals += sending
        # Where a bound on the output is affordable, its size is read while rows move.
        bound = None if request.static else self._bound_of(request, plan.tables.shape)
        if not (request.static or bound):
            self._size_exactly(plan, profile)
        num_slots = bound or plan.num_slots
        with profile.spend("wire"):
            rows = self._own_rows.scatter(plan, plan.own_rows, transfer, num_slots)
            self._scatter_slices(plan, transfer, rows, arrivals, num_slots)
        if bound:
            self._size_exactly(plan, profile)
            narrow(rows, plan.num_slots)
        return DispatchOutput(plan, rows)

    def _complete(
        self, request: DispatchRequest, plan: InternodePlan, terms: ForwardingTerms, transfer: Transfer
    ) -> None:
        """Note the rows without a token, and raise the rejection of an id that a plan found to be invalid."""
        ids = request.routing.topk_idx
        if rejection := self._planner.rejection_of(ids) or self.pending_error():
            raise LateRejection(rejection)
        num_empty = self.message_rows.num_empty(ids.shape, terms.ticket)
        if terms.max_rows is not None:
            plan.num_empty_rows = num_empty
            transfer.call.profile.internode_empty_bytes = num_empty * sum(transfer.row_bytes)

    def _size_exactly(self, plan: InternodePlan, profile: CallProfile) -> None:
        with profile.spend("planning"):
            self._planner.size_exactly(plan)

    def _traffic(self, request: DispatchRequest, published: Sequence[PublishedRows], call: Call) -> InternodeTraffic:
        """Return the rows in messages between nodes; those of a fixed size say nothing that a balancer could use."""
        num_rows = tuple(of_rank.num_rows_to_node for of_rank in published)
        is_balanced = not request.static and self._topology.ranks_per_node > 1
        # Sizes of messages that are fixed repeat, and so do those of a benchmark.
        key = (num_rows, request.balancer if is_balanced else None)
        is_repeatable = not is_balanced or is_builtin(request.balancer)  # a caller's balancer may not even be hashable
        known = self._known_traffic.use(key) if is_repeatable else None
        if known is None:
            if is_balanced:
                traffic = Traffic.from_counts(self._topology, num_rows, self._layout.rank_links)
                lanes = agreed_lanes(call, request.balancer, traffic, self._layout.max_crossing_rows)
            else:
                lanes = Lanes.of_groups(Groups.of_same_local_rank(self._topology), num_rows)
            known = InternodeTraffic(self._context.rank, lanes, num_rows)
            if is_repeatable:
                self._known_traffic[key] = known
        return known

    def _scatter_slices(
        self,
        plan: InternodePlan,
        transfer: Transfer,
        outputs: Sequence[torch.Tensor],
        arrivals: Sequence[torch.cuda.Event],
        num_slots: int,
    ) -> None:
        traffic, stream = plan.traffic, transfer.stream
        sizes = list(map(row_bytes, transfer.payloads))
        rows_per_slice = num_rows_per_slice(self._layout, traffic, sum(sizes))
        starts = forwarded_starts(self._arena, traffic, sizes)
        first_row, local = 0, self._arena.local
        for number, (held, arrival) in enumerate(zip(plan.slices(rows_per_slice), arrivals, strict=True)):
            stream.wait_event(arrival)
            moved = [
                Payload(start + first_row * size, size, output.data_ptr(), num_slots)
                for start, size, output in zip(starts, sizes, outputs, strict=True)
            ]
            self._own_rows.scatter_held(f"slice {number}", plan, held, moved, transfer)
            first_row += held.first_row[local + 1] - held.first_row[local]


def _require_alike(is_static: Sequence[int]) -> None:
    """Raise ``MismatchError``, the same on all ranks, unless all pass static rows or none does."""
    if len(set(is_static)) > 1:
        ranks = {kind: ", ".join(str(rank) for rank, of in enumerate(is_static) if of == kind) for kind in (0, 1)}
        raise MismatchError(
            f"ranks disagree in dispatch: ranks {ranks[1]} passed static rows, ranks {ranks[0]} did not. Between nodes "
            f"messages are of a fixed size on all ranks or on none"
        )
