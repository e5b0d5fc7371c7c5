"""Between nodes: one copy of a row for each node, in slices, packing, network and scattering all at work at once.

A slice goes through three streams. On one, rows are packed into a slot of a ring; on the network's, they travel into
the pool of the node's forwarder; on the caller's, all ranks of that node pull them out of the pool into their slots.
Tokens of the own node go there before all others. Combine is the mirror: a node's sum of a row goes home in one piece.

NCCL must be told how much a message has when it is launched. So the host waits once in each dispatch, until the device
has counted the rows for each node; exactly sized outputs take a second wait, as within a node.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch

from fusco.control.fingerprint import Agreement
from fusco.core.launch import Launch
from fusco.core.rows import accumulation_dtype, aligned, row_bytes
from fusco.cuda.failure import own_backlog
from fusco.cuda.internode_plan import Crossing, InternodePlan
from fusco.cuda.intranode import NodeShuffle
from fusco.cuda.kernels.payload import Payload
from fusco.cuda.nccl import Message
from fusco.cuda.network import Network, messages_of
from fusco.cuda.routing_messages import RoutingMessages
from fusco.cuda.slice_ring import SliceRing
from fusco.engine.agreed_groups import agreed_groups
from fusco.engine.base import DispatchOrder
from fusco.planner.balancer import Traffic
from fusco.planner.forwarding import DeviceForwarding
from fusco.planner.routing import Routing, describe_stranger

# Multiprocessors for moving rows, unless the caller says: faster than networks, and NCCL's kernels need some, too.
_NUM_SMS = 32


class InternodeShuffle:
    """What one rank does where there are several nodes."""

    def __init__(self, node: NodeShuffle, network: Network) -> None:
        self._node, self._network, layout = node, network, node.arena.layout
        self._layout, self._topology = layout, layout.topology
        device = node.arena.device
        self.packing_stream = torch.cuda.Stream(device, priority=-1)
        self._ring = SliceRing(network, layout, device)
        self._summary = torch.empty(self._topology.num_nodes + 2, dtype=torch.int64, device="cpu").pin_memory()
        self._has_summary = torch.cuda.Event()

    def dispatch(
        self, agreement: Agreement, order: DispatchOrder, stream: torch.cuda.Stream
    ) -> tuple[InternodePlan | None, list[torch.Tensor], Exception | None]:
        """See ``NodeShuffle.dispatch``."""
        node, launch = self._node, _with_sms(order.launch)
        order = replace(order, launch=launch)
        routing = replace(order.routing, topk_idx=order.routing.topk_idx.contiguous())
        payloads = list(map(aligned, order.payloads))
        with node.spend("planning"):
            with node.timeline.span("plan", "rows for each node"):
                forwarding = node.kernels.forwarding(routing.topk_idx, self._summary)
            *counts, bad_pair, bad_id = self._read_summary(stream)
            rejection = self._rejection_of(routing, bad_pair, bad_id)
            if rejection:
                agreement = replace(agreement, rejection=str(rejection))
            records = node.rounds.publish(agreement, [routing.num_tokens, *node.place_of(payloads), *counts])
            if rejection:
                return None, [], rejection

            num_rows = tuple(record.counts[3:] for record in records)
            traffic = Traffic.from_counts(self._topology, num_rows)
            groups = agreed_groups(node.rounds, agreement.operation, order.balancer, traffic)
            crossing = Crossing(node.arena.rank, groups, num_rows)
            told = RoutingMessages(routing, forwarding, crossing)
            self._pack_routing(told, stream)
        with node.staging(payloads, records, launch, stream):
            # Routing travels beside the first slice: by itself it would cost the network's latency once more.
            sending = self._send(payloads, forwarding, crossing, stream, (told.sends, told.receives))
            with node.spend("wire"):
                arrivals = list(itertools.islice(sending, 1))
            if arrivals:
                stream.wait_event(arrivals[0])
            on_node = crossing.num_rows_on_node([record.counts[0] for record in records])
            plan_type = partial(InternodePlan, crossing=crossing, forwarding=forwarding)
            with node.spend("planning"):
                plan = node.make_plan(plan_type, order, told.published, on_node, crossing.sources)
            with node.spend("wire"):
                arrivals += sending
            if not order.static:
                with node.spend("planning"):
                    plan = node.size_exactly(plan)
            with node.spend("wire"):
                rows = node.scatter_own(plan, plan.own_rows, payloads, records, launch)
        with node.spend("wire"):
            self._scatter_slices(plan, payloads, rows, arrivals, launch, stream)
        return plan, rows, None

    def dispatch_along(
        self,
        agreement: Agreement,
        plan: InternodePlan,
        payloads: Sequence[torch.Tensor],
        launch: Launch,
        stream: torch.cuda.Stream,
    ) -> list[torch.Tensor]:
        """See ``NodeShuffle.dispatch_along``."""
        node, launch = self._node, _with_sms(launch)
        payloads = list(map(aligned, payloads))
        records = node.rounds.publish(agreement, [plan.num_tokens, *node.place_of(payloads)])
        with node.staging(payloads, records, launch, stream), node.spend("wire"):
            arrivals = list(self._send(payloads, plan.forwarding, plan.crossing, stream))
            rows = node.scatter_own(plan, plan.own_rows, payloads, records, launch)
        with node.spend("wire"):
            self._scatter_slices(plan, payloads, rows, arrivals, launch, stream)
        return rows

    def combine(
        self,
        plan: InternodePlan,
        rows: torch.Tensor,
        wire_dtype: torch.dtype,
        launch: Launch,
        stream: torch.cuda.Stream,
        *,
        is_weighted: bool,
    ) -> torch.Tensor:
        """Sum rows: first those of other nodes' tokens, as these have the network ahead of them."""
        node, crossing, hidden = self._node, plan.crossing, rows.shape[1]
        num_sms = _with_sms(launch).num_sms
        rows_per_slice = self._layout.rows_per_slice(hidden * wire_dtype.itemsize)
        own_rows = crossing.num_rows[plan.rank]
        returned = {n: rows.new_empty(own_rows[n], hidden, dtype=wire_dtype) for n, _ in crossing.destinations}
        arrival = None
        self._network.stream.wait_stream(stream)
        for number, held in enumerate(plan.slices(rows_per_slice)):
            num_rows = sum(end - first for _, first, end in crossing.coming(number, rows_per_slice))
            slot = self._ring.slot(number, stream)
            sums = slot[: num_rows * hidden * wire_dtype.itemsize].view(wire_dtype).view(num_rows, hidden)
            with node.timeline.span("sum", f"slice {number}", stream):
                node.kernels.combine(held, rows, wire_dtype, sums, is_weighted=is_weighted, num_sms=num_sms)
            sends, first_row = [], 0
            for src, first, end in crossing.coming(number, rows_per_slice):
                sends += messages_of([(src, sums[first_row : first_row + end - first])])
                first_row += end - first
            receives = messages_of(
                (forwarder, returned[remote][first:end])
                for remote, forwarder, first, end in crossing.going(number, rows_per_slice)
            )
            self._count_rows(sends)
            arrival = self._ring.exchange(number, sends, receives, f"sums of slice {number}", stream, node.timeline)
        own = rows.new_empty(plan.num_tokens, hidden, dtype=accumulation_dtype(rows.dtype))
        with node.timeline.span("sum", "own tokens", stream):
            node.kernels.combine(plan.own_rows, rows, wire_dtype, own, is_weighted=is_weighted, num_sms=num_sms)
        if arrival:
            stream.wait_event(arrival)
        out = rows.new_empty(plan.num_tokens, hidden)
        remote_nodes = sorted(returned)
        with node.timeline.span("add", "sums of other nodes", stream):
            node.kernels.add_returned(
                own,
                [returned[remote] for remote in remote_nodes],
                [plan.forwarding.token_to_place[remote] for remote in remote_nodes],
                out,
            )
        return out

    def _pack_routing(self, told: RoutingMessages, stream: torch.cuda.Stream) -> None:
        """Ahead of rows."""
        node = self._node
        self.packing_stream.wait_stream(stream)
        with node.timeline.span("gather", "routing", self.packing_stream):
            told.pack(node.kernels, self.packing_stream)
        node.rounds.profile.internode_metadata_bytes += sum(message.num_bytes for message in told.sends)

    def _send(
        self,
        payloads: Sequence[torch.Tensor],
        forwarding: DeviceForwarding,
        crossing: Crossing,
        stream: torch.cuda.Stream,
        beside_first: tuple[Sequence[Message], Sequence[Message]] = ((), ()),
    ) -> Iterator[torch.cuda.Event]:
        """Launch the way of each slice into the forwarders' pools; an event for each that arrives here.

        ``beside_first`` are messages, sent and received, that travel with the first slice.
        """
        node, local = self._node, self._node.arena.local
        sizes = list(map(row_bytes, payloads))
        rows_per_slice = self._layout.rows_per_slice(sum(sizes))
        starts = self._forwarded_starts(crossing, local, sizes)
        # Nobody reads the pool any more once everything before this is done.
        self._network.stream.wait_stream(stream)
        self.packing_stream.wait_stream(stream)
        for number in range(crossing.num_slices(rows_per_slice)):
            free = self._ring.slot(number, self.packing_stream)
            sends: list[Message] = []
            going = crossing.going(number, rows_per_slice)
            places = [forwarding.node_to_tokens[remote, first:end] for remote, _, first, end in going]
            with node.timeline.span("gather", f"slice {number}", self.packing_stream):
                for payload, size in zip(payloads, sizes, strict=True):
                    messages = []
                    for of_node in places:
                        message, free = _take(free, len(of_node) * size)
                        messages.append(message)
                    parts = list(zip(places, messages, strict=True))
                    node.kernels.gather(payload, parts, self.packing_stream.cuda_stream)
                    forwarders = (forwarder for _, forwarder, _, _ in going)
                    sends += messages_of(zip(forwarders, messages, strict=True))
            receives: list[Message] = []
            first_row = crossing.first_in_pool(local, number, rows_per_slice)
            for src, first, end in crossing.coming(number, rows_per_slice):
                for start, size in zip(starts, sizes, strict=True):
                    arriving = node.arena.bytes_at(start + first_row * size, (end - first) * size)
                    receives += messages_of([(src, arriving)])
                first_row += end - first
            self._count_rows(sends)
            more = beside_first if number == 0 else ((), ())
            sends, receives = [*sends, *more[0]], [*receives, *more[1]]
            what = f"slice {number}"
            yield self._ring.exchange(number, sends, receives, what, self.packing_stream, node.timeline)

    def _scatter_slices(
        self,
        plan: InternodePlan,
        payloads: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        arrivals: Sequence[torch.cuda.Event],
        launch: Launch,
        stream: torch.cuda.Stream,
    ) -> None:
        node, crossing = self._node, plan.crossing
        sizes = list(map(row_bytes, payloads))
        rows_per_slice = self._layout.rows_per_slice(sum(sizes))
        addresses = [
            [node.arena.address(local, 0, start) for start in self._forwarded_starts(crossing, local, sizes)]
            for local in range(self._layout.num_ranks)
        ]
        moved = [
            Payload(address=0, row_bytes=size, output_address=output.data_ptr())
            for size, output in zip(sizes, outputs, strict=True)
        ]
        for number, (held, arrival) in enumerate(zip(plan.slices(rows_per_slice), arrivals, strict=True)):
            stream.wait_event(arrival)
            first_rows = [crossing.first_in_pool(local, number, rows_per_slice) for local in range(len(addresses))]
            rows = [
                [address + first_row * size for address, size in zip(of_rank, sizes, strict=True)]
                for of_rank, first_row in zip(addresses, first_rows, strict=True)
            ]
            # In place: each rank announces its rows when it comes here, and stays until all others have read them.
            with node.timeline.span("scatter", f"slice {number}", stream):
                node.kernels.scatter(
                    plan,
                    held,
                    moved,
                    rows,
                    in_place_ranks=(1 << self._layout.num_ranks) - 1,
                    clears_padding=False,
                    num_sms=launch.num_sms,
                )

    def _count_rows(self, sends: Sequence[Message]) -> None:
        self._node.rounds.profile.internode_row_bytes += sum(message.num_bytes for message in sends)

    def _forwarded_starts(self, crossing: Crossing, local: int, sizes: list[int]) -> list[int]:
        """Where each payload of what a rank of the node forwards begins in its arena."""
        num_rows = crossing.num_forwarded[local]
        return [self._layout.forwarded_offset(num_rows, sizes, p) for p in range(len(sizes))]

    def _read_summary(self, stream: torch.cuda.Stream) -> list[int]:
        self._has_summary.record(stream)
        self._node.watch.wait_until(self._has_summary.query, lambda: own_backlog("the number of rows for each node"))
        return [int(entry) for entry in self._summary.tolist()]

    def _rejection_of(self, routing: Routing, bad_pair: int, bad_id: int) -> ValueError | None:
        if bad_pair == routing.topk_idx.numel():
            return None
        token, k = divmod(bad_pair, routing.num_topk)
        return ValueError(describe_stranger(token, k, bad_id, self._node.placement.num_experts))


def _with_sms(launch: Launch) -> Launch:
    return launch if launch.num_sms else replace(launch, num_sms=_NUM_SMS)


def _take(free: torch.Tensor, num_bytes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Some bytes, and what is left behind them, aligned."""
    aligned = -(-num_bytes // 16) * 16
    return free[:num_bytes], free[aligned:]
