"""Dispatch and combine between nodes: one copy of a row for each node, in slices that overlap packing and network.

A slice passes through three streams. The packing stream gathers rows into a ring slot. The network's stream sends them
into the pool of the node's forwarder. On the caller's stream, all ranks of that node pull them from the pool into their
slots. Tokens of this node are scattered before all others. Combine is the mirror: one sum of a row returns from each
node.

NCCL needs the size of a message at launch. So the host waits once in each dispatch, until the device has counted the
rows for each node. Exactly sized outputs need a second wait, as within a node.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch

from fusco.core.config import Launch
from fusco.core.profile import Call
from fusco.core.rows import accumulation_dtype, aligned, row_bytes
from fusco.cuda.context import CudaContext
from fusco.cuda.failure import own_backlog
from fusco.cuda.internode_plan import InternodePlan
from fusco.cuda.kernels.abi import Payload
from fusco.cuda.kernels.add_returned import add_returned
from fusco.cuda.kernels.combine_rows import combine_rows
from fusco.cuda.kernels.gather_rows import gather_rows
from fusco.cuda.kernels.held_rows import HeldRows
from fusco.cuda.kernels.plan_forwarding import plan_forwarding
from fusco.cuda.kernels.scatter_rows import scatter_rows
from fusco.cuda.nccl import Message
from fusco.cuda.network import Network, messages_of
from fusco.cuda.own_rows import OwnRows, PublishedRows, Transfer
from fusco.cuda.planning import DevicePlanner
from fusco.cuda.routing_messages import RoutingMessages
from fusco.cuda.slice_ring import SliceRing
from fusco.cuda.tuning import INTERNODE_SMS
from fusco.engine.agreed_groups import agreed_groups
from fusco.engine.base import CombineRequest, DispatchOutput, DispatchRequest, Pending, RedispatchRequest
from fusco.planner.balancer import Traffic
from fusco.planner.forwarding import DeviceForwarding
from fusco.planner.internode import InternodeTraffic
from fusco.planner.routing import Routing, describe_invalid_id


class InternodeShuffle:
    """Dispatch and combine of one rank where there are several nodes."""

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
        self._packing_stream = packing_stream
        self._ring = SliceRing(network, self._layout, self._arena.device)
        self._summary = torch.empty(self._topology.num_nodes + 2, dtype=torch.int64, device="cpu").pin_memory()
        self._has_summary = torch.cuda.Event()

    def prepare_dispatch(
        self, request: DispatchRequest, call: Call, stream: torch.cuda.Stream
    ) -> Pending[DispatchOutput[InternodePlan]]:
        """Prepare planning and moving rows; waits until the device has counted the rows for each node.

        Raises ``ValueError`` for an invalid expert id.
        """
        request = replace(request, launch=_with_sms(request.launch))
        routing = replace(request.routing, topk_idx=request.routing.topk_idx.contiguous())
        payloads = list(map(aligned, request.payloads))
        with self._context.timeline.span("plan", "rows for each node"):
            forwarding = plan_forwarding(
                self._context.launcher(stream),
                routing.topk_idx,
                self._context.expert_to_node,
                self._context.node,
                self._summary,
            )
        *num_rows_to_node, bad_pair, bad_id = self._read_summary(stream)
        self._require_experts(routing, bad_pair, bad_id)

        def run(counts: Sequence[tuple[int, ...]]) -> DispatchOutput[InternodePlan]:
            published = list(map(PublishedRows.unpack, counts))
            transfer = Transfer(payloads=payloads, published=published, launch=request.launch, stream=stream, call=call)
            return self._dispatch(request, routing, forwarding, transfer)

        return Pending(self._own_rows.publish(routing.num_tokens, payloads, num_rows_to_node).pack(), run)

    def prepare_redispatch(
        self, request: RedispatchRequest[InternodePlan], call: Call, stream: torch.cuda.Stream
    ) -> Pending[list[torch.Tensor]]:
        """Move rows along an earlier plan."""
        plan, launch = request.plan, _with_sms(request.launch)
        payloads = list(map(aligned, request.payloads))

        def run(counts: Sequence[tuple[int, ...]]) -> list[torch.Tensor]:
            published = list(map(PublishedRows.unpack, counts))
            transfer = Transfer(payloads=payloads, published=published, launch=launch, stream=stream, call=call)
            with self._own_rows.staging(transfer) as staging_sms, call.profile.spend("wire"):
                arrivals = list(self._send(transfer, plan.forwarding, plan.traffic))
                rows = self._own_rows.scatter(plan, plan.own_rows, transfer, staging_sms)
            with call.profile.spend("wire"):
                self._scatter_slices(plan, transfer, rows, arrivals)
            return rows

        return Pending(self._own_rows.publish(plan.num_tokens, payloads).pack(), run)

    def combine(self, request: CombineRequest[InternodePlan], call: Call, stream: torch.cuda.Stream) -> torch.Tensor:
        """Sum rows: other nodes' tokens first, in slices, so that their sums are sent while local tokens are summed."""
        plan, rows = request.plan, aligned(request.rows)
        timeline, launcher = self._context.timeline, self._context.launcher(stream)
        returned, arrival = self._return_sums(request, rows, call, stream)
        own = rows.new_empty(plan.num_tokens, rows.shape[1], dtype=accumulation_dtype(rows.dtype))
        with timeline.span("sum", "own tokens", stream):
            self._sum(request, plan.own_rows, rows, own, call, stream)
        if arrival:
            stream.wait_event(arrival)
        out = rows.new_empty(plan.num_tokens, rows.shape[1])
        remote_nodes = sorted(returned)
        with timeline.span("add", "sums of other nodes", stream):
            add_returned(
                launcher,
                own,
                [returned[remote] for remote in remote_nodes],
                [plan.forwarding.token_to_place[remote] for remote in remote_nodes],
                out,
            )
        return out

    def _return_sums(
        self, request: CombineRequest[InternodePlan], rows: torch.Tensor, call: Call, stream: torch.cuda.Stream
    ) -> tuple[dict[int, torch.Tensor], torch.cuda.Event | None]:
        """Launch sums of other nodes' tokens; return the buffers of returning sums by node, and the last arrival."""
        plan, timeline, hidden = request.plan, self._context.timeline, rows.shape[1]
        traffic, wire_dtype = plan.traffic, self._context.wire_dtype(rows.dtype)
        rows_per_slice = self._layout.rows_per_slice(hidden * wire_dtype.itemsize)
        own_rows = traffic.num_rows[plan.rank]
        returned = {n: rows.new_empty(own_rows[n], hidden, dtype=wire_dtype) for n, _ in traffic.destinations}
        arrival = None
        self._network.stream.wait_stream(stream)
        for number, held in enumerate(plan.slices(rows_per_slice)):
            num_rows = sum(end - first for _, first, end in traffic.receives(number, rows_per_slice))
            slot = self._ring.slot(number, stream)
            sums = slot[: num_rows * hidden * wire_dtype.itemsize].view(wire_dtype).view(num_rows, hidden)
            with timeline.span("sum", f"slice {number}", stream):
                self._sum(request, held, rows, sums, call, stream)
            sends, first_row = [], 0
            for src, first, end in traffic.receives(number, rows_per_slice):
                sends += messages_of([(src, sums[first_row : first_row + end - first])])
                first_row += end - first
            receives = messages_of(
                (forwarder, returned[remote][first:end])
                for remote, forwarder, first, end in traffic.sends(number, rows_per_slice)
            )
            _count_rows(sends, call)
            arrival = self._ring.exchange(number, sends, receives, f"sums of slice {number}", stream, timeline)
        return returned, arrival

    def _sum(
        self,
        request: CombineRequest[InternodePlan],
        held: HeldRows,
        rows: torch.Tensor,
        out: torch.Tensor,
        call: Call,
        stream: torch.cuda.Stream,
    ) -> None:
        num_sms = combine_rows(
            self._context.launcher(stream),
            held,
            rows,
            self._context.wire_dtype(rows.dtype),
            out,
            is_weighted=request.is_weighted,
            num_sms=_with_sms(request.launch).num_sms,
        )
        call.profile.count_sms(num_sms)

    def _dispatch(
        self, request: DispatchRequest, routing: Routing, forwarding: DeviceForwarding, transfer: Transfer
    ) -> DispatchOutput[InternodePlan]:
        stream, profile, published = transfer.stream, transfer.call.profile, transfer.published
        with profile.spend("planning"):
            num_rows = tuple(of_rank.num_rows_to_node for of_rank in published)
            groups = agreed_groups(transfer.call, request.balancer, Traffic.from_counts(self._topology, num_rows))
            traffic = InternodeTraffic(self._context.rank, groups, num_rows)
            messages = RoutingMessages(routing, forwarding, traffic)
            self._pack_routing(messages, transfer)
        with self._own_rows.staging(transfer) as staging_sms:
            # Routing travels with the first slice: separate, it would cost the network's latency once more.
            sending = self._send(transfer, forwarding, traffic, (messages.sends, messages.receives))
            with profile.spend("wire"):
                arrivals = list(itertools.islice(sending, 1))
            if arrivals:
                stream.wait_event(arrivals[0])
            on_node = traffic.num_rows_on_node([of_rank.num_tokens for of_rank in published])
            plan_type = partial(InternodePlan, traffic=traffic, forwarding=forwarding)
            with profile.spend("planning"):
                plan = self._planner.make_plan(plan_type, request, messages.published, on_node, stream, traffic.sources)
            with profile.spend("wire"):
                arrivals += sending
            if not request.static:
                with profile.spend("planning"):
                    plan = self._planner.size_exactly(plan)
            with profile.spend("wire"):
                rows = self._own_rows.scatter(plan, plan.own_rows, transfer, staging_sms)
        with profile.spend("wire"):
            self._scatter_slices(plan, transfer, rows, arrivals)
        return DispatchOutput(plan, rows)

    def _pack_routing(self, routing: RoutingMessages, transfer: Transfer) -> None:
        """Pack routing before any rows."""
        self._packing_stream.wait_stream(transfer.stream)
        with self._context.timeline.span("gather", "routing", self._packing_stream):
            routing.pack(self._context.launcher(self._packing_stream))
        transfer.call.profile.internode_metadata_bytes += sum(message.num_bytes for message in routing.sends)

    def _send(
        self,
        transfer: Transfer,
        forwarding: DeviceForwarding,
        traffic: InternodeTraffic,
        with_first: tuple[Sequence[Message], Sequence[Message]] = ((), ()),
    ) -> Iterator[torch.cuda.Event]:
        """Launch the transfer of each slice into the forwarders' pools; yield an event for each that arrives here.

        ``with_first``: messages, sent and received, that travel with the first slice.
        """
        timeline, local, packing = self._context.timeline, self._arena.local, self._packing_stream
        sizes = list(map(row_bytes, transfer.payloads))
        rows_per_slice = self._layout.rows_per_slice(sum(sizes))
        starts = self._forwarded_starts(traffic, local, sizes)
        # No peer reads the pool once all earlier work is complete.
        self._network.stream.wait_stream(transfer.stream)
        packing.wait_stream(transfer.stream)
        for number in range(traffic.num_slices(rows_per_slice)):
            free = self._ring.slot(number, packing)
            outgoing = traffic.sends(number, rows_per_slice)
            places = [forwarding.node_to_tokens[remote, first:end] for remote, _, first, end in outgoing]
            with timeline.span("gather", f"slice {number}", packing):
                packed = self._pack(transfer.payloads, places, free)
            sends: list[Message] = []
            for messages in packed:
                forwarders = (forwarder for _, forwarder, _, _ in outgoing)
                sends += messages_of(zip(forwarders, messages, strict=True))
            receives: list[Message] = []
            first_row = traffic.first_in_pool(local, number, rows_per_slice)
            for src, first, end in traffic.receives(number, rows_per_slice):
                for start, size in zip(starts, sizes, strict=True):
                    arriving = self._arena.bytes_at(start + first_row * size, (end - first) * size)
                    receives += messages_of([(src, arriving)])
                first_row += end - first
            _count_rows(sends, transfer.call)
            more = with_first if number == 0 else ((), ())
            sends, receives = [*sends, *more[0]], [*receives, *more[1]]
            yield self._ring.exchange(number, sends, receives, f"slice {number}", packing, timeline)

    def _pack(
        self, payloads: Sequence[torch.Tensor], places: Sequence[torch.Tensor], free: torch.Tensor
    ) -> list[list[torch.Tensor]]:
        """Return, per payload, a message to each other node: its rows at ``places``, packed into ``free`` bytes."""
        launcher, packed = self._context.launcher(self._packing_stream), []
        for payload in payloads:
            messages = []
            for of_node in places:
                message, free = _take(free, len(of_node) * row_bytes(payload))
                messages.append(message)
            gather_rows(launcher, payload, list(zip(places, messages, strict=True)))
            packed.append(messages)
        return packed

    def _scatter_slices(
        self,
        plan: InternodePlan,
        transfer: Transfer,
        outputs: Sequence[torch.Tensor],
        arrivals: Sequence[torch.cuda.Event],
    ) -> None:
        traffic, stream = plan.traffic, transfer.stream
        sizes = list(map(row_bytes, transfer.payloads))
        rows_per_slice = self._layout.rows_per_slice(sum(sizes))
        addresses = [
            [self._arena.address(local, 0, start) for start in self._forwarded_starts(traffic, local, sizes)]
            for local in range(self._layout.num_ranks)
        ]
        moved = [
            Payload(address=0, row_bytes=size, output_address=output.data_ptr())
            for size, output in zip(sizes, outputs, strict=True)
        ]
        launcher = self._context.launcher(stream)
        for number, (held, arrival) in enumerate(zip(plan.slices(rows_per_slice), arrivals, strict=True)):
            stream.wait_event(arrival)
            first_rows = [traffic.first_in_pool(local, number, rows_per_slice) for local in range(len(addresses))]
            rows = [
                address + first_row * size
                for of_rank, first_row in zip(addresses, first_rows, strict=True)
                for address, size in zip(of_rank, sizes, strict=True)
            ]
            # As rows in place: each rank announces its rows here and waits until all others have read them.
            with self._context.timeline.span("scatter", f"slice {number}", stream):
                num_sms = scatter_rows(
                    launcher,
                    plan,
                    held,
                    moved,
                    rows,
                    in_place_ranks=(1 << self._layout.num_ranks) - 1,
                    clears_padding=False,
                    num_sms=transfer.launch.num_sms,
                )
            transfer.call.profile.count_sms(num_sms)

    def _forwarded_starts(self, traffic: InternodeTraffic, local: int, sizes: list[int]) -> list[int]:
        """Return the arena offsets of the payloads that a rank of the node forwards."""
        num_rows = traffic.num_forwarded[local]
        return [self._layout.forwarded_offset(num_rows, sizes, p) for p in range(len(sizes))]

    def _read_summary(self, stream: torch.cuda.Stream) -> list[int]:
        self._has_summary.record(stream)
        wait_until = self._context.watchdog.wait_until
        wait_until(self._has_summary.query, lambda: own_backlog("the number of rows for each node"))
        return [int(entry) for entry in self._summary.tolist()]

    def _require_experts(self, routing: Routing, bad_pair: int, bad_id: int) -> None:
        if bad_pair != routing.topk_idx.numel():
            token, k = divmod(bad_pair, routing.num_topk)
            raise ValueError(describe_invalid_id(token, k, bad_id, self._context.placement.num_experts))


def _count_rows(sends: Sequence[Message], call: Call) -> None:
    call.profile.internode_row_bytes += sum(message.num_bytes for message in sends)


def _with_sms(launch: Launch) -> Launch:
    return launch if launch.num_sms else replace(launch, num_sms=INTERNODE_SMS)


def _take(free: torch.Tensor, num_bytes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first bytes, and the rest, aligned."""
    aligned = -(-num_bytes // 16) * 16
    return free[:num_bytes], free[aligned:]
