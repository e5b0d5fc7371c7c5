"""CPU engine: implements every verb as a set of tasks over shared memory and TCP."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from fusco.control.connect import Connections, connecting
from fusco.control.tcp_transport import TcpTransport
from fusco.control.transport import Mesh, Transport
from fusco.core.config import EngineConfig
from fusco.core.environment import rail_names
from fusco.core.errors import Stall
from fusco.core.lanes import Groups, IntArray, Lanes
from fusco.core.profile import Call, CallProfile
from fusco.core.rows import as_bytes, expert_rows_shape, plain, row_bytes
from fusco.core.segments import Segments
from fusco.core.timeline import HostTimeline, NoTimeline, Timeline
from fusco.core.topology import Topology
from fusco.core.wire import Wire
from fusco.cpu.all_to_all import ByteMemory, Exchanges, awaited_counters
from fusco.cpu.channel import SendRing
from fusco.cpu.combine import AttachedSums, FoldSums, ProducePartialSums
from fusco.cpu.dispatch import ReceiveRows, ScatterRows, SendRows
from fusco.cpu.kernels.plan_pairs import plan_pairs
from fusco.cpu.kernels.quantize_rows import quantize_rows
from fusco.cpu.kernels.segment_memory import JoinedPieces, JoinedSegments
from fusco.cpu.kernels.sum_rows import Terms, cut_chunks
from fusco.cpu.kernels.warm_up import warm_up_cpu
from fusco.cpu.layout import CpuLayout
from fusco.cpu.memory import CpuMemory
from fusco.cpu.owner_choice import CpuOwnerChoice
from fusco.cpu.plan import CpuPlan, overflow_of
from fusco.cpu.quantizer import CpuQuantizer
from fusco.cpu.rail_transport import RailTransport
from fusco.cpu.recycler import OutputRecycler
from fusco.cpu.routing_exchange import Attachments, RoutingExchange
from fusco.engine.agreed_lanes import PublishedRows, agreed_lanes
from fusco.engine.all_to_all import plan_all_to_all, plan_shuffle
from fusco.engine.base import (
    AllToAllRequest,
    CombineRequest,
    DispatchOutput,
    DispatchRequest,
    LateRejection,
    Pending,
    RedispatchRequest,
    ShuffleRequest,
    weights_of_rows,
)
from fusco.engine.quantizer import Origin
from fusco.engine.tasks import Awaited, Task, run_stream, run_tasks
from fusco.planner.balancer import balance_by_lanes
from fusco.planner.dispatch_plan import NodeForwarding, select_tokens
from fusco.planner.rank_lanes import RankLanes, lane_links
from fusco.planner.sending import SendingStage, plan_stages, warm_up_stages
from fusco.planner.traffic import Traffic
from fusco.rails.rail import configured_rails
from fusco.schedule.cost import CPU_LINKS
from fusco.schedule.rank_schedule import RankSchedule

# How long a rank polls before it sleeps. It yields its core to other ranks meanwhile, so it may share one. With 2 ranks
# on 2 cores and 64 tokens a pair took 0.6 ms instead of 1.0, with 16 ranks 16 instead of 18 (docs/performance/cpu.md).
SPIN_S = 1e-3


class CpuEngine:
    """Engine of one rank on the CPU. Methods are those of ``fusco.engine.base.Engine``, documented there."""

    def __init__(self, connections: Connections, config: EngineConfig) -> None:
        """Connect to all other ranks over TCP. The caller keeps the connections, and closes them after the engine."""
        self._layout, self._rank = CpuLayout.of(config), connections.store_gather.rank
        self._topology, self._settings, self._watchdog = config.topology, config.settings, connections.watchdog
        self._links = replace(CPU_LINKS, lane_links=lane_links(config.rank_links))
        self._recycler = OutputRecycler()
        self._timeline: HostTimeline | None = None  # while one is recorded
        with ExitStack() as resources:
            self._memory = CpuMemory(connections.memory, self._layout)
            resources.callback(self._memory.close)
            self._transport = _connect_nodes(config.topology, connections)
            resources.callback(self._transport.close)  # before the memory, which messages may still be written to
            shape = (self._layout.num_private_slots, self._layout.slot_bytes)
            self._private = torch.empty(shape, dtype=torch.uint8, device="cpu")
            # Over rails a slot is in use until the peer has acknowledged it. In dispatch and combine the receive slots
            # are free, except the last, for sums.
            num_slots = config.settings.ring_depth if isinstance(self._transport, TcpTransport) else -1
            self._send_slots = list(self._private[:num_slots])
            self._exchanges = Exchanges(self._memory, self._transport, self._private)
            self._routing_exchange = RoutingExchange(self._memory, self._transport, self._watchdog)
            self._counterparts = Groups.of_same_local_rank(config.topology)
            lanes = Lanes.of_groups(self._counterparts, [[0]] * config.topology.world_size)
            self._no_lanes = RankLanes(self._rank, lanes)
            # Other balancers are the caller's choice of who sends, and stages of when.
            is_small = self._layout.control.attachment_bytes > 0 and config.settings.slice_order != "staged"
            self._can_attach = is_small and isinstance(self._transport, TcpTransport)
            self._resources = resources.pop_all()

    @property
    def mesh(self) -> Mesh | None:
        """Carries records over the rails; ``None`` without rails."""
        return Mesh(self._transport) if isinstance(self._transport, RailTransport) else None

    @property
    def topology(self) -> Topology:
        return self._topology

    @property
    def _is_one_node(self) -> bool:
        """True if nothing crosses between nodes: a balancer has nothing to choose then."""
        return self._topology.num_nodes == 1

    @property
    def is_asynchronous(self) -> bool:
        return False

    def owner_choice(self) -> CpuOwnerChoice:
        return CpuOwnerChoice()

    def quantizer(self) -> CpuQuantizer:
        return CpuQuantizer()

    def pending_error(self) -> Exception | None:
        return None  # errors are never deferred

    def prepare_dispatch(self, request: DispatchRequest, call: Call) -> Pending[DispatchOutput[CpuPlan]]:
        forwarding = select_tokens(request.routing.topk_idx, request.placement, self._topology)
        published = PublishedRows(request.routing.num_tokens, tuple(forwarding.num_tokens_to_node))
        self._routing_exchange.publish(request.routing)
        self._stage(request.payloads, call, request.origin)
        attachments: Attachments | None = None
        if self._can_attach and request.balancer is balance_by_lanes:
            num_bytes = sum(map(row_bytes, request.payloads))
            attachments = Attachments(self._memory, request.routing, num_bytes, forwarding, call.profile)

        def run(counts: Sequence[tuple[int, ...]]) -> DispatchOutput[CpuPlan]:
            with call.profile.spend("planning"):
                plan = self._plan(request, forwarding, list(map(PublishedRows.unpack, counts)), attachments, call)
            rows = self._move_rows(plan, request.payloads, attachments, call)
            if overflow := overflow_of(plan.distribution, request.static, self._topology.numbers[self._rank]):
                raise LateRejection(overflow)
            return DispatchOutput(plan, rows, weights_of_rows(plan, request))

        return Pending(published.pack(), run, attachments.attachment if attachments else None)

    def prepare_redispatch(self, request: RedispatchRequest[CpuPlan], call: Call) -> Pending[list[torch.Tensor]]:
        self._stage(request.payloads, call, request.origin)
        return Pending((), lambda _: self._move_rows(request.plan, request.payloads, None, call))

    def prepare_combine(self, request: CombineRequest[CpuPlan], call: Call) -> Pending[list[torch.Tensor]]:
        (rows,) = request.rows
        plan, weights = request.plan, request.weights
        if not (plan.is_attached and self._layout.can_attach_sums):
            return Pending((), lambda _: [self._sum_rows(plan, rows, weights, call)])
        with call.profile.spend("staging"):
            terms = Terms.of(plain(rows), weights, plan.pairs, self._memory.local)
            sums = AttachedSums(plan, self._memory, terms, self._wire(rows), rows.dtype, call)

        def run(_: Sequence[tuple[int, ...]]) -> list[torch.Tensor]:
            with call.profile.spend("wire"):
                out = self._recycler.empty((plan.num_rows_from(self._rank), terms.hidden), rows.dtype)
                sums.finish(out)
            return [out]

        return Pending((), run, sums.attach)

    def _wire(self, rows: torch.Tensor) -> Wire:
        return Wire.of(rows.dtype, rows.shape[1], self._settings.wire_dtype)

    def _plan(
        self,
        request: DispatchRequest,
        forwarding: NodeForwarding,
        counts: Sequence[PublishedRows],
        attachments: Attachments | None,
        call: Call,
    ) -> CpuPlan:
        num_tokens_to_node, exchange = [list(of_rank.num_rows_to_node) for of_rank in counts], self._routing_exchange
        stages: tuple[SendingStage, ...] = ()
        if attachments:
            lanes = Lanes.of_groups(self._counterparts, num_tokens_to_node)
        elif self._is_one_node:
            lanes = self._no_lanes.lanes
        else:
            traffic = Traffic.from_counts(self._topology, num_tokens_to_node, self._layout.rank_links)
            lanes = agreed_lanes(call, request.balancer, traffic, self._layout.max_crossing_rows)
            if self._settings.slice_order == "staged":
                stages = plan_stages(traffic, self._topology.rank_to_node[self._rank])
        for rank, node in enumerate(self._topology.rank_to_node):
            num_tokens_to_node[rank][node] = counts[rank].num_tokens
        if attachments or self._is_one_node:
            routing = exchange.collect(num_tokens_to_node, request.routing, attachments)
        else:
            routing = exchange.exchange(
                call.sequence_number, request.routing, forwarding, num_tokens_to_node, call.profile
            )
        rank, placement = self._rank, request.placement
        locals_ = self._topology.locals_of(self._memory.node)
        pairs = plan_pairs(routing, placement, rank, locals_, request.expert_alignment, request.static)
        return CpuPlan(
            rank=rank,
            placement=placement,
            rank_lanes=self._no_lanes if self._is_one_node else RankLanes(rank, lanes),
            forwarding=forwarding,
            routing=routing,
            distribution=pairs.distribution,
            sending_stages=stages,
            pairs=pairs,
            is_attached=attachments is not None,
        )

    def _stage(self, payloads: Sequence[torch.Tensor], call: Call, origin: Origin | None = None) -> None:
        """Copy rows into the pool. A rank does so before it publishes its record, and no other waits for them later.

        Rows that are sent quantised become codes and scales on the way.
        """
        sizes, num_tokens = list(map(row_bytes, payloads)), len(payloads[0])
        with call.profile.spend("staging"):
            rows = self._memory.own_rows((num_tokens, sum(sizes)))
            if origin:
                quantize_rows(plain(origin.x), origin.quantize, rows[:, : sizes[0]], rows[:, sizes[0] :])
                return
            for payload, size, end in zip(payloads, sizes, itertools.accumulate(sizes), strict=True):
                rows[:, end - size : end].copy_(as_bytes(plain(payload)).view(num_tokens, size))

    def _move_rows(
        self, plan: CpuPlan, payloads: Sequence[torch.Tensor], attachments: Attachments | None, call: Call
    ) -> list[torch.Tensor]:
        memory, sizes = self._memory, list(map(row_bytes, payloads))
        bytes_per_token = sum(sizes)
        with call.profile.spend("wire"):
            num_slots = plan.distribution.num_slots
            rows_shape = expert_rows_shape(num_slots, plan.rows_per_expert)
            outputs = [self._recycler.empty((*rows_shape, *each.shape[1:]), each.dtype) for each in payloads]
            as_bytes_out = [as_bytes(output).view(num_slots, size) for output, size in zip(outputs, sizes, strict=True)]
            if plan.distribution.has_padding:
                for output in as_bytes_out:
                    output[plan.distribution.padding_slots] = 0
            attached = attachments.rows(np.diff(plan.routing.src_to_first_row)) if attachments else None
            scatter = ScatterRows(plan, memory, call.sequence_number, as_bytes_out, attached, call.profile)
            crossing = [] if attachments or self._is_one_node else self._crossing_tasks(plan, bytes_per_token, call)
            self._run([*crossing, scatter], scatter.awaited)
        return outputs

    def _crossing_tasks(self, plan: CpuPlan, bytes_per_token: int, call: Call) -> list[Task]:
        """Return the tasks that send this rank's part of the rows to other nodes, and receive theirs."""
        received = plan.rank_lanes.received
        rows_per_slice = plan.rows_per_slice(self._layout.rows_per_slot(bytes_per_token))
        return [
            SendRows(plan, self._memory, self._send_ring(), bytes_per_token, call),
            self._receive_rows(received.carrier, received.num_rows, bytes_per_token, rows_per_slice, call),
        ]

    def _sum_rows(
        self, plan: CpuPlan, rows: torch.Tensor, pair_weights: torch.Tensor | None, call: Call
    ) -> torch.Tensor:
        with call.profile.spend("wire"):
            terms = Terms.of(plain(rows), pair_weights, plan.pairs, self._memory.local)
            wire = self._wire(rows)
            rows_per_chunk = plan.rows_per_slice(self._layout.rows_per_slot(terms.sum_bytes))
            chunks = cut_chunks(plan.held_rows, self._memory.ranks, rows_per_chunk)
            carried, size = plan.rank_lanes.carried, wire.row_bytes
            returned: list[Task] = []
            if not self._is_one_node:
                returned = [self._receive_rows(carried.forwarder, carried.num_rows, size, rows_per_chunk, call)]
            out = self._recycler.empty((plan.num_rows_from(self._rank), terms.hidden), rows.dtype)
            fold = FoldSums(
                plan=plan,
                memory=self._memory,
                terms=terms,
                chunks=chunks,
                send_ring=self._send_ring(),
                scratch=self._private[-1],
                out=out,
                wire=wire,
                call=call,
            )
            produce = ProducePartialSums(self._memory, terms, chunks)
            self._run([produce, fold, *returned], lambda: np.concatenate((produce.awaited(), fold.awaited())))
        return out

    def prepare_shuffle(self, request: ShuffleRequest, call: Call) -> Pending[None]:
        def run(counts: Sequence[Sequence[int]]) -> None:
            with call.profile.spend("planning"):
                slot_bytes = self._layout.slot_bytes
                rank_schedule = plan_shuffle(request, counts, self._topology, self._rank, slot_bytes, self._links)
            with call.profile.spend("wire"):
                if rank_schedule is None:
                    self._run(self._exchanges.of_segments(request.send, request.receive, call.profile))
                    return
                ends = list(map(JoinedSegments, request.of_others(self._rank)))
                own_send, own_receive = request.of_rank(self._rank)
                own = self._exchanges.of_segments(own_send, own_receive, call.profile)
                self._run([*self._schedule_tasks(rank_schedule, ends, call), *own])

        return Pending(request.counts(self._topology.world_size), run)

    def _schedule_tasks(self, rank_schedule: RankSchedule, ends: Sequence[ByteMemory], call: Call) -> list[Task]:
        """Make the tasks of a schedule; ``ends`` are its input and output."""
        memories = [*ends, *map(self.staging, rank_schedule.spare_bytes)]
        return self._exchanges.of_schedule(rank_schedule, memories, call.profile)

    def staging(self, num_bytes: int) -> torch.Tensor:
        return self._recycler.empty((num_bytes,), torch.uint8)

    def prepare_all_to_all(self, request: AllToAllRequest, call: Call) -> Pending[AllToAllRequest]:
        def run(counts: Sequence[Sequence[int]]) -> AllToAllRequest:
            with call.profile.spend("planning"):
                rank_schedule = plan_all_to_all(request, counts, self._topology, self._rank, self._links)
            with call.profile.spend("wire"):
                input_, output = request.memories
                source = JoinedPieces(request.pieces) if request.pieces else input_
                tasks = self._schedule_tasks(rank_schedule, [source, output], call)
                awaited = partial(awaited_counters, tasks) if request.meanwhile else None
                self._run(tasks, awaited, request.meanwhile)
            return request

        return Pending(request.counts, run)

    def stream(self, name: str, send: Mapping[int, Segments], receive: Mapping[int, Segments]) -> None:
        run_stream(name, send, receive, partial(self._exchanges.of_segments, profile=CallProfile()), self._run)

    def _is_over(self) -> None:
        """Every call has ended when it returns, nothing is launched, and a rank at its end needs no peer."""

    wait = synchronize = stop_watching = finish = abort = _is_over

    def record(self, timeline: Timeline | NoTimeline) -> None:
        self._timeline = timeline if isinstance(timeline, HostTimeline) else None

    def has_finished(self) -> bool:
        return True

    def num_live_graphs(self, *, are_deleted: bool = False) -> int:  # noqa: ARG002
        return 0

    def keep_captured(self) -> tuple[()]:
        return ()

    def close(self) -> None:
        self._resources.close()
        self._recycler.close()

    def _run(
        self, tasks: Sequence[Task], awaited: Awaited | None = None, meanwhile: Iterator[bool] | None = None
    ) -> None:
        """Run tasks to their end, and send what peers still wait for, since this rank may not poll again for long."""
        run_tasks(tasks, self._watchdog, awaited, self._timeline, meanwhile)
        transport = self._transport
        if transport.unflushed_peers:
            self._watchdog.wait_until(
                lambda: not transport.unflushed_peers,
                lambda: Stall("acknowledging", transport.unflushed_peers, "room for acknowledgements", "none"),
            )

    def _send_ring(self) -> SendRing:
        return SendRing(self._transport, self._send_slots)

    def _receive_rows(
        self, peer: IntArray, num_rows: IntArray, row_bytes: int, rows_per_slice: int, call: Call
    ) -> ReceiveRows:
        runs = list(zip(peer.tolist(), num_rows.tolist(), strict=True))
        return ReceiveRows(self._memory, self._transport, call.sequence_number, runs, row_bytes, rows_per_slice)


def warm_up(config: EngineConfig) -> None:
    """Compile everything an engine runs. This can take seconds, so call it before connecting, which has a timeout."""
    warm_up_cpu()
    if config.settings.slice_order == "staged":
        warm_up_stages()


def _connect_nodes(topology: Topology, connections: Connections) -> Transport:
    """Connect to the ranks of other nodes, over the rails of this host if ``FUSCO_RAILS`` names any."""
    store_gather, watchdog = connections.store_gather, connections.watchdog
    local_node = topology.rank_to_node[store_gather.rank]
    peers = [rank for rank, node in enumerate(topology.rank_to_node) if node != local_node]
    has_rails = bool(peers and rail_names())

    def connect() -> Transport:
        if has_rails:
            return RailTransport(store_gather, peers, configured_rails, connections.secret)
        return TcpTransport(store_gather, peers, connections.listen_on, connections.secret)

    watchdog.begin(0, "Communicator")
    transport = connecting(connect, "over rails" if has_rails else "over TCP", tuple(peers), watchdog)
    watchdog.watch_network(transport, {}, polls=bool(peers))
    watchdog.end()
    return transport
