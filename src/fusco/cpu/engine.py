"""The CPU engine: one rank's part in every verb, as sets of tasks over shared memory and gloo."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace

import torch

from fusco.control.connect import Connections, connect, connecting
from fusco.control.fingerprint import Agreement
from fusco.control.layout import ArenaLayout
from fusco.control.session import Rounds
from fusco.control.store_gather import RollCall
from fusco.core.errors import SharedMemoryError, SlotOverflowError, Stall
from fusco.core.launch import Launch
from fusco.core.profile import CallProfile
from fusco.core.rows import as_bytes, plain, row_bytes
from fusco.core.segments import Segments
from fusco.core.timeline import NoTimeline, Timeline
from fusco.core.topology import Topology
from fusco.cpu.all_to_all import LINKS, make_tasks
from fusco.cpu.byte_streams import Streams
from fusco.cpu.channel import SendRing
from fusco.cpu.combine import FoldSums, PartialSums, ProducePartialSums
from fusco.cpu.dispatch import ReceiveRows, ScatterRows, SendRows
from fusco.cpu.gloo import GlooTransport, NoTransport
from fusco.cpu.kernels.warm_up import warm_up_cpu
from fusco.cpu.recycler import OutputRecycler
from fusco.cpu.routing_exchange import RoutingExchange
from fusco.engine.agreed_groups import agreed_groups
from fusco.engine.base import Delivery, DispatchOrder, ExchangeOrder
from fusco.engine.byte_stream import check_sizes, stream_sizes, stream_with
from fusco.engine.exchange_plan import agree_on_exchange
from fusco.engine.tasks import run
from fusco.planner.balancer import Traffic
from fusco.planner.forwarding import plan_forwarding
from fusco.planner.plan import DispatchPlan, make_plan
from fusco.planner.sending import plan_stages, warm_up_stages


class CpuEngine:
    """See ``fusco.engine.base.Engine``."""

    def __init__(self, roll: RollCall, layout: ArenaLayout, hosts: Sequence[str], listen_on: str) -> None:
        """Connect to all other ranks; for the arguments see ``connect``."""
        warm_up_cpu()
        if layout.settings.slice_order == "staged":
            warm_up_stages()
        self._layout, self._rank = layout, roll.rank
        self._topology, self._settings = layout.topology, layout.settings
        self._recycler = OutputRecycler()
        with ExitStack() as resources:
            connections = connect(roll, layout, hosts, listen_on)
            resources.callback(connections.close)
            self._watch, self._memory = connections.watch, connections.memory
            is_alone = self._topology.num_nodes == 1
            self._transport = NoTransport() if is_alone else _connect_over_gloo(roll, layout, connections, listen_on)
            resources.callback(self._transport.close)  # before the memory, into which messages may still come
            self._private = torch.empty(layout.num_private_slots, layout.slot_bytes, dtype=torch.uint8, device="cpu")
            self._rounds = Rounds(roll.rank, connections)
            self._routing_exchange = RoutingExchange(self._memory, self._transport, self._watch)
            self._resources = resources.pop_all()

    @property
    def profile(self) -> CallProfile:
        """See ``Engine``."""
        return self._rounds.profile

    @property
    def topology(self) -> Topology:
        """See ``Engine``."""
        return self._topology

    @property
    def num_collectives(self) -> int:
        """See ``Engine``."""
        return self._rounds.number

    def collective(self, operation: str) -> AbstractContextManager[None]:
        """See ``Engine``."""
        return self._rounds.collective(operation)

    def pending_error(self) -> Exception | None:
        """See ``Engine``: here everything shows at once."""
        return None

    def agree(self, agreement: Agreement) -> None:
        """See ``Engine``."""
        self._rounds.publish(agreement, [])

    def dispatch(self, agreement: Agreement, order: DispatchOrder | None) -> Delivery | None:
        """See ``Engine``."""
        plan = self._plan(agreement, order)
        if plan is None or order is None:
            return None
        rows, overflow = self._move_rows(plan, order.payloads), None
        needed = plan.distribution.num_slots_needed
        if order.static and order.static.on_overflow == "raise" and needed > order.static.num_slots:
            overflow = SlotOverflowError(self._rank, order.static.num_slots, needed)
        return Delivery(plan, rows, overflow)

    def dispatch_along(
        self,
        agreement: Agreement,
        plan: DispatchPlan,
        payloads: Sequence[torch.Tensor],
        launch: Launch,  # noqa: ARG002  there is nothing to choose
    ) -> list[torch.Tensor] | None:
        """See ``Engine``."""
        self._rounds.publish(agreement, [])
        return None if agreement.rejection else self._move_rows(plan, payloads)

    def combine(
        self,
        agreement: Agreement,
        plan: DispatchPlan,
        rows: torch.Tensor,
        weights: torch.Tensor | None,
        launch: Launch,  # noqa: ARG002  there is nothing to choose
    ) -> torch.Tensor | None:
        """See ``Engine``."""
        self._rounds.publish(agreement, [])
        return None if agreement.rejection else self._sum_rows(plan, rows, weights)

    def _plan(self, agreement: Agreement, order: DispatchOrder | None) -> DispatchPlan | None:
        with self.profile.spend("planning"):
            if order is None or agreement.rejection:
                self._rounds.publish(agreement, [0] * (1 + self._topology.num_nodes))
                return None
            routing, placement = order.routing, order.placement
            forwarding = plan_forwarding(routing.topk_idx, placement, self._topology)
            records = self._rounds.publish(agreement, [routing.num_tokens, *forwarding.num_tokens_to_node])
            num_tokens_to_node = [list(record.counts[1:]) for record in records]
            traffic = Traffic.from_counts(self._topology, num_tokens_to_node)
            groups = agreed_groups(self._rounds, agreement.operation, order.balancer, traffic)
            is_staged = self._settings.slice_order == "staged"
            for rank, node in enumerate(self._topology.rank_to_node):
                num_tokens_to_node[rank][node] = records[rank].counts[0]
            known = self._routing_exchange.exchange(
                self._rounds.number, routing, forwarding, num_tokens_to_node, self.profile
            )
            return make_plan(
                rank=self._rank,
                placement=placement,
                groups=groups,
                forwarding=forwarding,
                routing=known,
                expert_alignment=order.expert_alignment,
                static_slots=order.static.num_slots if order.static else None,
                sending_stages=plan_stages(traffic, self._topology.rank_to_node[self._rank]) if is_staged else (),
            )

    def _move_rows(self, plan: DispatchPlan, payloads: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        memory, shapes = self._memory, [payload.shape[1:] for payload in payloads]
        sizes = list(map(row_bytes, payloads))
        bytes_per_token, num_tokens = sum(sizes), len(payloads[0])
        with self.profile.spend("staging"):
            rows = memory.pool(memory.local, memory.node, (num_tokens, bytes_per_token), torch.uint8)
            for payload, size, end in zip(payloads, sizes, itertools.accumulate(sizes), strict=True):
                rows[:, end - size : end].copy_(as_bytes(plain(payload)).view(num_tokens, size))
            memory.own.store(self._layout.rows_flag, self._rounds.number)
        with self.profile.spend("wire"):
            num_slots = plan.distribution.num_slots
            outputs = [
                self._recycler.empty((num_slots, *shape), payload.dtype)
                for payload, shape in zip(payloads, shapes, strict=True)
            ]
            as_bytes_out = [as_bytes(output).view(num_slots, size) for output, size in zip(outputs, sizes, strict=True)]
            for output in as_bytes_out:
                output[plan.distribution.padding_slots] = 0
            forwarded = [src for src in plan.sources_held_by(self._rank) if src != self._rank]
            run(
                [
                    SendRows(plan, memory, self._send_ring(), bytes_per_token, self.profile),
                    self._receive_rows(
                        {src: plan.num_rows_from(src) for src in forwarded}, bytes_per_token, bytes_per_token
                    ),
                    ScatterRows(plan, memory, self._rounds.number, as_bytes_out, bytes_per_token, self.profile),
                ],
                self._watch,
            )
        return outputs

    def _sum_rows(self, plan: DispatchPlan, rows: torch.Tensor, pair_weights: torch.Tensor | None) -> torch.Tensor:
        with self.profile.spend("wire"):
            partials = PartialSums(plan, plain(rows), pair_weights)
            wire_dtype = torch.promote_types(rows.dtype, self._settings.wire_dtype or rows.dtype)
            sum_bytes = partials.hidden * partials.dtype.itemsize
            rows_per_chunk = self._layout.rows_per_slot(sum_bytes)
            to_nodes = {
                plan.groups.forwarder(self._rank, node): len(plan.forwarding.node_to_tokens[node])
                for node in self._topology.remote_nodes(self._rank)
            }
            returned = self._receive_rows(to_nodes, partials.hidden * wire_dtype.itemsize, sum_bytes)
            out = self._recycler.empty((plan.num_rows_from(self._rank), partials.hidden), rows.dtype)
            fold = FoldSums(
                plan=plan,
                memory=self._memory,
                partials=partials,
                returned=returned,
                send_ring=self._send_ring(),
                scratch=(self._private[-1], self._private[-2]),
                out=out,
                wire_dtype=wire_dtype,
                rows_per_chunk=rows_per_chunk,
                profile=self.profile,
            )
            produce = ProducePartialSums(plan, self._memory, partials, rows_per_chunk)
            run([produce, fold, returned], self._watch)
        return out

    def shuffle(self, agreement: Agreement, send: Mapping[int, Segments], receive: Mapping[int, Segments]) -> None:
        """See ``Engine``."""
        world_size = self._topology.world_size
        records = self._rounds.publish(agreement, stream_sizes(send, receive, world_size))
        if agreement.rejection:
            return
        check_sizes(records, world_size)
        with self.profile.spend("wire"):
            run(self._streams().tasks(send, receive), self._watch)

    def all_to_all(self, agreement: Agreement, exchange: ExchangeOrder | None) -> None:
        """See ``Engine``."""
        itinerary = agree_on_exchange(self._rounds, agreement, exchange, self._topology, self._rank, LINKS)
        if itinerary is None or exchange is None:
            return
        with self.profile.spend("wire"):
            memories = [
                *exchange.memories,
                *(self._recycler.empty((size,), torch.uint8) for size in itinerary.spare_bytes),
            ]
            tasks = make_tasks(itinerary, memories, self._memory, self._transport, self._private, self.profile)
            run(tasks, self._watch)

    def gather_send(self, segments: Segments, dst: int) -> None:
        """See ``Engine``."""
        with self._stream_with(dst, f"gather_send to rank {dst}", segments) as streams:
            run(streams.tasks({dst: segments}, {}), self._watch)

    def scatter_recv(self, segments: Segments, src: int) -> None:
        """See ``Engine``."""
        with self._stream_with(src, f"scatter_recv from rank {src}", segments) as streams:
            run(streams.tasks({}, {src: segments}), self._watch)

    def empty(self, agreement: Agreement, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
        """See ``Engine``: here rows are copied in any case, since peers would need the caller's pages."""
        memory, error = None, None
        if not agreement.rejection:
            try:
                memory = torch.empty(shape, dtype=dtype, device="cpu")
            except RuntimeError as failure:
                num_bytes, why = math.prod(shape) * dtype.itemsize, str(failure).splitlines()[0]
                error = SharedMemoryError(f"{num_bytes:,} bytes of memory could not be had: {why}")
                agreement = replace(agreement, rejection=str(error))
        self._rounds.publish(agreement, [])
        if error:
            raise error
        return memory

    def wait(self) -> None:
        """See ``Engine``: here nothing is ever under way."""

    def synchronize(self) -> None:
        """See ``Engine``: here nothing is ever under way."""
        with self._rounds.operation("synchronize"):
            pass

    def settle(self) -> None:
        """See ``Engine``: here whoever has come to the end has all that it needs."""

    def has_finished(self) -> bool:
        """See ``Engine``."""
        return True

    def record(self, timeline: Timeline | NoTimeline) -> None:
        """See ``Engine``. Nothing is launched here; ``profile`` has the times."""

    def abandon(self, reason: str) -> None:
        """See ``Engine``."""
        self._rounds.abandon(reason)

    def depart(self, reason: str) -> None:
        """See ``Engine``."""
        self._rounds.depart(reason)

    def close(self) -> None:
        """See ``Engine``."""
        self._rounds.end("it is closed")
        self._resources.close()
        self._recycler.close()

    def _send_ring(self) -> SendRing:
        return SendRing(self._transport, list(self._private[: self._settings.ring_depth]))

    def _receive_rows(self, src_to_rows: dict[int, int], row_bytes: int, slot_row_bytes: int) -> ReceiveRows:
        rows_per_slice = self._layout.rows_per_slot(slot_row_bytes)
        return ReceiveRows(self._memory, self._transport, self._rounds.number, src_to_rows, row_bytes, rows_per_slice)

    def _streams(self) -> Streams:
        return Streams(self._memory, self._transport, self._private)

    @contextmanager
    def _stream_with(self, peer: int, name: str, segments: Segments) -> Iterator[Streams]:
        with self._rounds.operation(name):
            self._watch.begin(self._rounds.number, name)
            streams = self._streams()
            with stream_with(streams, peer, name, segments, self._watch):
                yield streams


def _connect_over_gloo(roll: RollCall, layout: ArenaLayout, connections: Connections, listen_on: str) -> GlooTransport:
    watch, mail = connections.watch, connections.mail
    others = tuple(rank for rank in range(roll.world_size) if rank != roll.rank)
    stall = Stall("connecting", others, "a connection to each", "too few")

    def connect_all() -> GlooTransport:
        limit_s = layout.settings.timeout_s
        return GlooTransport(
            roll.store,
            roll.rank,
            roll.world_size,
            limit_s,
            listen_on,
            lambda is_ready: watch.wait_until(is_ready, lambda: stall),
        )

    watch.begin(0, "Communicator")
    transport = connecting(connect_all, "over gloo", others, watch)
    watch.network_failure = lambda: mail.failure or transport.failure
    watch.end()
    return transport
