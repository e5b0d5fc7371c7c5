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
from typing import Any, NamedTuple

import torch

from fusco.core.config import Launch
from fusco.core.errors import MismatchError
from fusco.core.groups import Groups
from fusco.core.lanes import Lanes
from fusco.core.profile import Call, CallProfile
from fusco.core.recent import Recent
from fusco.core.rows import accumulation_dtype, aligned, plain, row_bytes
from fusco.cuda.between_nodes.latest_launches import LatestCombine, LatestDispatch
from fusco.cuda.between_nodes.message_rows import MessageRows
from fusco.cuda.between_nodes.nccl import Message
from fusco.cuda.between_nodes.network import Network
from fusco.cuda.between_nodes.plan import InternodePlan
from fusco.cuda.between_nodes.routing_messages import RoutingMessages
from fusco.cuda.between_nodes.slice_ring import SliceRing
from fusco.cuda.between_nodes.slice_sender import SliceSender, forwarded_starts, num_rows_per_slice
from fusco.cuda.context import CudaContext
from fusco.cuda.kernels.abi import MemoryAt, Payload
from fusco.cuda.kernels.add_returned import add_returned
from fusco.cuda.kernels.combine_rows import combine_rows
from fusco.cuda.kernels.held_rows import HeldRows
from fusco.cuda.kernels.launcher import Launcher
from fusco.cuda.kernels.node_barrier import node_barrier
from fusco.cuda.kernels.plan_forwarding import ForwardingTensors, ForwardingTerms, plan_forwarding
from fusco.cuda.tuning import INTERNODE_SMS
from fusco.cuda.within_node.output_bound import affordable_bound_of
from fusco.cuda.within_node.own_rows import OwnRows, Transfer
from fusco.cuda.within_node.planning import DevicePlanner
from fusco.cuda.within_node.shuffle import narrowed
from fusco.engine.agreed_lanes import agreed_lanes
from fusco.engine.base import CombineRequest, DispatchOutput, DispatchRequest, LateRejection, Pending, RedispatchRequest
from fusco.engine.published_rows import PublishedRows
from fusco.planner.balancer import is_builtin
from fusco.planner.internode import InternodeTraffic
from fusco.planner.routing import Routing
from fusco.planner.traffic import Traffic

_LAUNCH = Launch(num_sms=INTERNODE_SMS)


class _Summing(NamedTuple):
    """Inputs of every launch of a combine."""

    request: CombineRequest[InternodePlan]
    rows: torch.Tensor  # aligned
    wire_dtype: torch.dtype
    launcher: Launcher  # on ``stream``
    stream: torch.cuda.Stream
    call: Call


class InternodeShuffle:
    """Dispatch and combine of one rank where there are several nodes.

    Attributes:
        message_rows: chooses the rows of messages.
        latest_dispatch: has launched what may be repeated; likewise ``latest_combine``.
    """

    latest_dispatch: LatestDispatch
    latest_combine: LatestCombine

    def __init__(
        self,
        context: CudaContext,
        planner: DevicePlanner,
        own_rows: OwnRows,
        network: Network,
        packing_stream: torch.cuda.Stream,
    ) -> None:
        self._context, self._planner, self._own_rows, self._network = context, planner, own_rows, network
        self._arena, self._layout, self._topology = context.arena, context.layout, context.topology
        self._ring = SliceRing(network, self._layout, self._arena.memory)
        self._sender = SliceSender(context, network, self._ring, packing_stream)
        self.message_rows = MessageRows(context)
        self._known_traffic: Recent[Any, InternodeTraffic] = Recent(max_size=64)

    @cached_property
    def repeated_routing(self) -> torch.Tensor:
        """Memory for the routing that repeated dispatches send and receive, uint8 (2, ...)."""
        return torch.empty(2, self._layout.repeated_routing_bytes // 2, dtype=torch.uint8, device=self._arena.device)

    def pending_error(self) -> Exception | None:
        """Return and clear an error of an earlier plan into static rows, or of a message of fixed size."""
        return self._planner.pending_error() or self.message_rows.pending_error()

    def prepare_dispatch(
        self, request: DispatchRequest, call: Call, stream: torch.cuda.Stream
    ) -> Pending[DispatchOutput[InternodePlan]]:
        """Prepare planning and moving rows; waits until the device has counted them if messages are of their size.

        Then raises ``ValueError`` for an invalid expert id. Otherwise the plan finds it.
        """
        weights = request.routing.topk_weights
        routing = Routing(request.routing.topk_idx.contiguous(), None if weights is None else plain(weights))
        request = replace(request, launch=_with_sms(request.launch), routing=routing)
        payloads = list(map(aligned, request.payloads))
        terms = self.message_rows.terms_of(request)
        with self._context.timeline.span("plan", "rows for each node"):
            forwarding, packed, launched = plan_forwarding(
                self._context.launcher(stream), routing, self._context.expert_to_node, self.message_rows.summary, terms
            )
        self.latest_dispatch = latest = LatestDispatch(terms, launched, packed)
        num_rows_to_node = self.message_rows.published(routing, terms)
        if terms.max_rows is None and (earlier := self.pending_error()):  # the device has run all earlier calls
            raise earlier

        def run(counts: Sequence[tuple[int, ...]]) -> DispatchOutput[InternodePlan]:
            _require_alike([is_static for is_static, *_ in counts])
            published = [PublishedRows.unpack(of_rank[1:]) for of_rank in counts]
            transfer = Transfer(payloads=payloads, launch=request.launch, stream=stream, call=call)
            latest.counts, latest.scatters = counts, transfer.launched
            output = self._dispatch(request, published, forwarding, transfer)
            if not request.static:
                self._complete(request, output.plan, terms, transfer)
            return output

        published = PublishedRows(routing.num_tokens, tuple(num_rows_to_node))
        return Pending([int(request.static is not None), *published.pack()], run)

    def redispatch(
        self, request: RedispatchRequest[InternodePlan], call: Call, stream: torch.cuda.Stream
    ) -> list[torch.Tensor]:
        """Move rows along an earlier plan."""
        plan, payloads = request.plan, list(map(aligned, request.payloads))
        transfer = Transfer(payloads=payloads, launch=_with_sms(request.launch), stream=stream, call=call)
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
        """Sum rows: other nodes' tokens first, in slices, so that their sums are sent while local tokens are summed."""
        plan, timeline = request.plan, self._context.timeline
        wire_dtype, launcher = self._context.wire_dtype(rows.dtype), self._context.launcher(stream)
        summing = _Summing(request, rows, wire_dtype, launcher, stream, call)
        self.latest_combine = LatestCombine()
        returned, arrival = self._return_sums(summing)
        own = rows.new_empty(plan.num_tokens, rows.shape[1], dtype=accumulation_dtype(rows.dtype))
        with timeline.span("sum", "own tokens", stream):
            self._sum(summing, plan.own_rows, own)
        if arrival:
            stream.wait_event(arrival)
            if plan.traffic.is_shared:
                self._fetch_sums(summing, returned)
        out = rows.new_empty(plan.num_tokens, rows.shape[1])
        remote_nodes, places = sorted(returned), plan.forwarding
        call.profile.internode_empty_bytes = plan.num_empty_rows * rows.shape[1] * wire_dtype.itemsize
        sums = [returned[remote] for remote in remote_nodes]
        places_of = [MemoryAt(places.address + places.offset_of_places(remote), 4) for remote in remote_nodes]
        with timeline.span("add", "sums of other nodes", stream):
            self.latest_combine.add = add_returned(launcher, own, sums, places_of, out)
        return out

    def _return_sums(self, summing: _Summing) -> tuple[dict[int, torch.Tensor], torch.cuda.Event | None]:
        """Launch sums of other nodes' tokens; return the buffers of returning sums by node, and the last arrival."""
        request, rows, wire_dtype, _, stream, call = summing
        plan, traffic, timeline, hidden = request.plan, request.plan.traffic, self._context.timeline, rows.shape[1]
        size = hidden * wire_dtype.itemsize
        rows_per_slice = num_rows_per_slice(self._layout, traffic, size)
        own_rows = traffic.num_rows[plan.rank]
        returned = {n: rows.new_empty(own_rows[n], hidden, dtype=wire_dtype) for n in traffic.destinations}
        carried = self._arena.address(self._arena.local, self._layout.offsets["pool"])
        streams = stream, self._network.stream
        arrival = None
        for number, held in enumerate(plan.slices(rows_per_slice)):
            sums = self._ring.slot(number, stream, wire_dtype)
            with timeline.span("sum", f"slice {number}", stream):
                self._sum(summing, held, sums)
            sends, address = [], sums.data_ptr()
            for piece in traffic.receives(plan.rank, number, rows_per_slice):
                sends.append(Message(piece.carrier, address, piece.num_rows * size))
                address += piece.num_rows * size
            receives = []
            for piece in traffic.sends(number, rows_per_slice):
                is_own = piece.src == plan.rank
                place = returned[piece.node].data_ptr() + piece.first * size if is_own else carried + piece.place * size
                receives.append(Message(piece.forwarder, place, piece.num_rows * size))
            call.profile.internode_row_bytes += sum(message.num_bytes for message in sends)
            self.latest_combine.sends = sends
            arrival = self._ring.exchange(number, sends, receives, f"sums of slice {number}", streams, timeline)
        return returned, arrival

    def _fetch_sums(self, summing: _Summing, returned: dict[int, torch.Tensor]) -> None:
        """Copy the sums of this rank's rows that others of its node carry, as soon as all have received theirs."""
        traffic, nodes = summing.request.plan.traffic, self._topology.rank_to_local
        with self._context.timeline.span("copy", "sums that other ranks carried", summing.stream):
            node_barrier(summing.launcher)
            tables = (*(column.tolist() for column in traffic.own), traffic.own_places.tolist())
            for _, node, first, end, carrier, _, place in zip(*tables, strict=True):
                if carrier != traffic.rank:
                    sums = returned[node][first:end]
                    sums.copy_(self._arena.pooled_like(nodes[carrier], place, sums))
                    summing.call.profile.lane_row_bytes += sums.nbytes
            node_barrier(summing.launcher)  # carriers may overwrite them

    def _sum(self, summing: _Summing, held: HeldRows, out: torch.Tensor) -> None:
        request, rows, wire_dtype, launcher, _, call = summing
        num_sms = _with_sms(request.launch).num_sms
        launched = combine_rows(launcher, held, rows, wire_dtype, out, is_weighted=request.is_weighted, num_sms=num_sms)
        call.profile.count_sms(launched.grid)
        self.latest_combine.sums.append(launched)

    def _dispatch(
        self,
        request: DispatchRequest,
        published: Sequence[PublishedRows],
        forwarding: ForwardingTensors,
        transfer: Transfer,
    ) -> DispatchOutput[InternodePlan]:
        stream, profile = transfer.stream, transfer.call.profile
        with profile.spend("planning"):
            traffic = self._traffic(request, published, transfer.call)
            messages = RoutingMessages(request.routing, self.latest_dispatch.packed, traffic)
            profile.internode_metadata_bytes += sum(message.num_bytes for message in messages.sends)
        # Routing travels with the first slice: separate, it would cost the network's latency once more.
        sending = self._sender.send(
            transfer, forwarding, traffic, (messages.sends, messages.receives), self.latest_dispatch
        )
        with profile.spend("wire"):
            arrivals = list(itertools.islice(sending, 1))
        if arrivals:
            stream.wait_event(arrivals[0])
        on_node = traffic.num_rows_on_node([of_rank.num_tokens for of_rank in published])
        plan_type = partial(InternodePlan, traffic=traffic, forwarding=forwarding)
        with profile.spend("planning"):
            plan = self._planner.new_plan(plan_type, request, on_node, stream, traffic.sources)
            self.latest_dispatch.plan = self._planner.launch(plan, request, messages.published, stream)
        with profile.spend("wire"):
            arrivals += sending
        # Where a bound on the output is affordable, its size is read while rows move.
        bound = None if request.static else affordable_bound_of(plan, request, transfer.row_bytes)
        if not (request.static or bound):
            self._size_exactly(plan, profile)
        num_slots = bound or plan.num_slots
        with profile.spend("wire"):
            rows = self._own_rows.scatter(plan, plan.own_rows, transfer, num_slots)
            self._scatter_slices(plan, transfer, rows, arrivals, num_slots)
        if bound:
            self._size_exactly(plan, profile)
            narrowed(rows, plan.num_slots)
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


def _with_sms(launch: Launch) -> Launch:
    if launch == Launch():
        return _LAUNCH
    return launch if launch.num_sms else replace(launch, num_sms=INTERNODE_SMS)
