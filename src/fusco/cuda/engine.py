"""CUDA engine: one rank's part of every verb, as kernels on a stream."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any, Protocol, TypeVar

import torch

from fusco.control.connect import Connections
from fusco.control.member_gather import Gather
from fusco.control.watchdog import PeerWatch
from fusco.core.config import EngineConfig, Launch
from fusco.core.errors import Stall
from fusco.core.placement import ExpertPlacement
from fusco.core.profile import Call
from fusco.core.segments import Segments
from fusco.core.threads import leak
from fusco.core.timeline import NoTimeline, Timeline
from fusco.core.topology import Topology
from fusco.cuda.all_to_all import Arrival, ByteMemory, MessageRounds, SegmentMemory
from fusco.cuda.between_nodes.network import Network
from fusco.cuda.between_nodes.shuffle import InternodeShuffle
from fusco.cuda.byte_streams import DeviceSegmentChannels
from fusco.cuda.captured_calls import CapturedCalls, LiveGraphs
from fusco.cuda.context import CudaContext
from fusco.cuda.failure import own_backlog, stall_of
from fusco.cuda.gpu import Gpu
from fusco.cuda.kernels.copy_experts import bytes_of_experts
from fusco.cuda.kernels.copy_segments import copy_segments
from fusco.cuda.kernels.exchange_rows import exchange_rows
from fusco.cuda.kernels.library import Library
from fusco.cuda.memory.arena import Arena
from fusco.cuda.memory.layout import DeviceLayout
from fusco.cuda.owner_choice import CudaOwnerChoice
from fusco.cuda.quantizer import CudaQuantizer
from fusco.cuda.repeated_calls import RepeatedCalls
from fusco.cuda.stream_order import Drain, StreamOrder, inside
from fusco.cuda.within_node.device_plan import DevicePlan
from fusco.cuda.within_node.own_rows import OwnRows
from fusco.cuda.within_node.planning import DevicePlanner
from fusco.cuda.within_node.shuffle import IntranodeShuffle
from fusco.engine.all_to_all import plan_all_to_all, plan_shuffle
from fusco.engine.base import (
    AllToAllRequest,
    CombineRequest,
    DispatchOutput,
    DispatchRequest,
    Pending,
    RedispatchRequest,
    ShuffleRequest,
    weights_of_rows,
)
from fusco.engine.tasks import Task, run_stream, run_tasks
from fusco.planner.rank_lanes import lane_links
from fusco.schedule.cost import CUDA_LINKS
from fusco.schedule.rank_schedule import RankSchedule

_ENDING = 0.5  # fraction of the time limit, for launched work to complete before its memory is released


_PlanT = TypeVar("_PlanT", bound=DevicePlan)


class Shuffle(Protocol[_PlanT]):
    """Dispatch and combine, within one node or between several. Everything is launched on the given stream."""

    def pending_error(self) -> Exception | None:
        """Return and clear an error of an earlier call into static rows, which no host waits for."""

    def prepare_dispatch(
        self, request: DispatchRequest, call: Call, stream: torch.cuda.Stream
    ) -> Pending[DispatchOutput[_PlanT]]:
        """Prepare what ``Engine.prepare_dispatch`` returns."""

    def redispatch(
        self, request: RedispatchRequest[_PlanT], call: Call, stream: torch.cuda.Stream
    ) -> list[torch.Tensor]:
        """Move rows along an earlier plan, once all ranks agree."""

    def combine(self, request: CombineRequest[_PlanT], call: Call, stream: torch.cuda.Stream) -> list[torch.Tensor]:
        """Sum rows of each tensor, once all ranks agree."""


class CudaEngine:
    """Engine of one rank on CUDA. Methods are those of ``fusco.engine.base.Engine``, documented there."""

    def __init__(
        self,
        connections: Connections,
        config: EngineConfig,
        placement: ExpertPlacement,
        library: Library,
        gpu: Gpu | None = None,
        *,
        num_experts: int | None = None,
        captured: Sequence[CapturedCalls] = (),
    ) -> None:
        """Map the arenas of this node's ranks, and connect to other nodes over NCCL.

        ``placement`` is of physical experts, and ``num_experts`` what a caller may name; by default the same.
        ``captured`` is from ``keep_captured`` of the engines of earlier members.
        ``library`` is from ``open_library``; ``gpu`` replaces its device. The caller owns the connections and closes
        them after this engine. Their memory holds only records and flags of byte streams, never rows.
        """
        self._gpu = gpu = gpu or Gpu(library.device)
        self._topology, self._device = config.topology, library.device
        store_gather, self._watchdog, self._memory = connections.store_gather, connections.watchdog, connections.memory
        self._rank, self._placement = store_gather.rank, placement
        self._links = replace(CUDA_LINKS, lane_links=lane_links(config.rank_links))
        self._ending_s = _ENDING * config.settings.timeout_s
        self._drain: Drain | None = None
        self._graphs, self._captured, self._keeps_captured = LiveGraphs(gpu), list[CapturedCalls](), False
        self._network: Network | None = None
        with ExitStack() as resources, gpu.entered():
            device_layout = DeviceLayout.of(config)
            expert_bytes = bytes_of_experts(device_layout.num_ranks, placement.num_experts, num_experts)
            self._arena = Arena.of(device_layout, expert_bytes, store_gather, gpu)
            self._peer_watch = PeerWatch(self._watchdog, self.abort)
            self._order = StreamOrder(gpu, self._graphs.note)
            resources.callback(self._release_memory)
            self._context = CudaContext.of(library, self._arena, placement, self._watchdog, num_experts)
            if self._topology.num_nodes > 1:
                self._network = self._connect_nodes(store_gather, config.settings.timeout_s)
                resources.callback(self._network.close)
            resources.callback(self._peer_watch.close)
            self._shuffle = self._make_shuffle(connections.transport.descriptors)
            self._watchdog.watch_device(self._device_stall)
            for each in captured:
                each.go_on_among(self._topology)
            gpu.synchronize()  # the first verb may run on any stream
            store_gather.all_gather("arena", "")  # barrier: no rank writes to an arena before its owner has cleared it
            self._captured += captured
            self._peer_watch.start()
            self._resources = resources.pop_all()

    def _connect_nodes(self, store_gather: Gather, timeout_s: float) -> Network:
        stream, num_remote_nodes = self._order.new_stream(priority=-1), self._topology.num_nodes - 1
        on_stall = self._arena.abort_after_network
        return Network(self._gpu, store_gather, self._watchdog, stream, num_remote_nodes, timeout_s, on_stall)

    def _make_shuffle(self, descriptors: Mapping[int, int]) -> Shuffle[Any]:
        planner = DevicePlanner(self._context)
        own_rows, order, memory = OwnRows(self._context), self._order, self._memory
        if not self._network:
            return IntranodeShuffle(self._context, planner, own_rows, RepeatedCalls(self._context, order, memory))
        repeated_calls = RepeatedCalls(self._context, order, memory, descriptors)
        packing_stream = order.new_stream(priority=-1)
        return InternodeShuffle(self._context, planner, own_rows, self._network, packing_stream, repeated_calls)

    @property
    def topology(self) -> Topology:
        return self._topology

    @property
    def is_asynchronous(self) -> bool:
        return True

    def owner_choice(self) -> CudaOwnerChoice:
        return CudaOwnerChoice(self._context, self._order, self._network)

    def quantizer(self) -> CudaQuantizer:
        return CudaQuantizer(self._context, self._order)

    def pending_error(self) -> Exception | None:
        of_captured = (each.pending_error() for each in self._captured)
        return self._shuffle.pending_error() or next(filter(None, of_captured), None)

    def num_live_graphs(self, *, are_deleted: bool = False) -> int:
        each_graphs = (self._graphs, *(each.graphs for each in self._captured))
        return sum(graphs.count_soon() if are_deleted else graphs.count for graphs in each_graphs)

    def keep_captured(self) -> list[CapturedCalls]:
        self._keeps_captured = True
        for each in self._captured:
            if not each.graphs.count:
                each.arena.close()
        self._captured = [each for each in self._captured if each.graphs.count]
        if self._graphs.count and not self._network and all(each.arena is not self._arena for each in self._captured):
            self._captured.append(CapturedCalls(self._arena, self._graphs, self._shuffle.pending_error))
        return list(self._captured)

    def prepare_dispatch(self, request: DispatchRequest, call: Call) -> Pending[DispatchOutput[DevicePlan]]:
        """Wait, between nodes, on the host for the counts of rows, and validate expert ids."""
        launch, order = request.launch, self._order
        inputs = (*request.payloads, request.routing.topk_idx, request.routing.topk_weights)
        stream, context = order.enter(launch, *inputs)
        pending: Pending[DispatchOutput[DevicePlan]]
        pending = inside(context, self._shuffle.prepare_dispatch, request, call, stream)
        if not (launch.own_stream or launch.event or request.with_weights or context):
            return pending

        def run(counts: Sequence[tuple[int, ...]]) -> DispatchOutput[DevicePlan]:
            output = inside(context, pending.run, counts)
            weights = inside(context, weights_of_rows, output.plan, request)
            outputs = [*output.rows, *output.plan.tensors, *([] if weights is None else [weights])]
            return replace(output, weights=weights, event=order.hand_over(outputs, launch, stream))

        return Pending(pending.counts, run)

    def prepare_redispatch(self, request: RedispatchRequest[DevicePlan], call: Call) -> Pending[list[torch.Tensor]]:
        return self._along_plan(request, request.payloads, self._shuffle.redispatch, call)

    def prepare_combine(self, request: CombineRequest[DevicePlan], call: Call) -> Pending[list[torch.Tensor]]:
        return self._along_plan(request, request.rows, self._shuffle.combine, call)

    def _along_plan(
        self,
        request: RedispatchRequest[DevicePlan] | CombineRequest[DevicePlan],
        rows: Sequence[torch.Tensor],
        move: Callable[..., list[torch.Tensor]],
        call: Call,
    ) -> Pending[list[torch.Tensor]]:
        launch, order = request.launch, self._order

        def run(_: Sequence[tuple[int, ...]]) -> list[torch.Tensor]:
            begin = perf_counter()
            stream, context = order.enter(launch, *rows, held=request.plan)
            outputs: list[torch.Tensor] = inside(context, move, request, call, stream)
            call.profile.wire_s += perf_counter() - begin
            if launch.own_stream or launch.event:
                order.hand_over(outputs, launch, stream)
            return outputs

        return Pending((), run)

    def prepare_shuffle(self, request: ShuffleRequest, call: Call) -> Pending[None]:
        """Return when everything has arrived."""

        def run(counts: Sequence[Sequence[int]]) -> None:
            with call.profile.spend("planning"):
                slot_bytes = self._arena.layout.slot_bytes
                rank_schedule = plan_shuffle(request, counts, self._topology, self._rank, slot_bytes, self._links)
            with self._order.on_stream(Launch()) as stream, call.profile.spend("wire"):
                if rank_schedule is None:
                    self._run(self._streams(stream).tasks(request.send, request.receive))
                    return
                ends = list(map(SegmentMemory, request.of_others(self._rank)))
                arrival = Arrival(self._exchange_between_nodes(ends, rank_schedule, call, stream), rank_schedule)
                self._run([arrival, *self._streams(stream).tasks(*request.of_rank(self._rank))])

        return Pending(request.counts(self._topology.world_size), run)

    def prepare_all_to_all(self, request: AllToAllRequest, call: Call) -> Pending[AllToAllRequest]:
        """Keep the order of the caller's stream."""
        if request.pieces:
            request = replace(request, input=_joined(request.pieces, request.num_sms), pieces=())

        def run(counts: Sequence[Sequence[int]]) -> AllToAllRequest:
            on_stream = partial(self._order.on_stream, Launch(), request.input, request.output)
            if not self._network:
                with call.profile.spend("wire"), on_stream() as stream:
                    self._exchange_within_node(request, call, stream)
                return request
            with call.profile.spend("planning"):
                rank_schedule = plan_all_to_all(request, counts, self._topology, self._rank, self._links)
            with call.profile.spend("wire"), on_stream() as stream:
                terms = (request.memories, rank_schedule, call, stream, request.num_sms)
                stream.wait_event(self._exchange_between_nodes(*terms))
            return request

        return Pending(request.counts, run)

    def _exchange_within_node(self, request: AllToAllRequest, call: Call, stream: torch.cuda.Stream) -> None:
        sent, received = (request.input, request.send_rows), (request.output, request.receive_rows)
        exchange_rows(self._context.launcher(stream), self._arena.layout, sent, received, request.num_sms)
        num_rows = sum(request.receive_rows) - request.receive_rows[self._rank]
        call.profile.intranode_row_bytes += num_rows * request.row_bytes

    def _exchange_between_nodes(
        self,
        ends: Sequence[ByteMemory],
        rank_schedule: RankSchedule,
        call: Call,
        stream: torch.cuda.Stream,
        num_sms: int | None = None,
    ) -> torch.cuda.Event:
        """Launch a schedule from its input to its output, and return the event of its end."""
        assert self._network
        network = self._network.stream
        network.wait_stream(stream)
        with self._gpu.on(network):
            copy = partial(copy_segments, self._context.launcher(network), num_sms=num_sms)
            rounds = MessageRounds(rank_schedule, ends, self._network, copy, self._device)
            return rounds.run(call.profile)

    def staging(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def stream(self, name: str, send: Mapping[int, Segments], receive: Mapping[int, Segments]) -> None:
        """Return when everything has arrived."""
        with self._order.on_stream(Launch()) as cuda_stream:
            run_stream(name, send, receive, self._streams(cuda_stream).tasks, self._run)

    def wait(self) -> None:
        self._order.wait()

    def synchronize(self) -> None:
        if self._order.latest is None and not self._captured:
            return
        done = self._order.mark()
        self._watchdog.wait_until(done.query, lambda: own_backlog("all launched work to complete"))
        self._watchdog.check_device()

    def stop_watching(self) -> None:
        self._peer_watch.close()

    def finish(self) -> None:
        if self._network:
            self._network.finish()

    def has_finished(self) -> bool:
        with self._gpu.on(self._order.own):
            return self._has_work_ended() and not self._device_stall()

    def record(self, timeline: Timeline | NoTimeline) -> None:
        self._context.timeline = timeline

    def abort(self) -> None:
        for arena in (self._arena, *(each.arena for each in self._captured)):
            arena.abort()

    def close(self) -> None:
        self._resources.close()
        while self._captured and not self._keeps_captured:
            self._captured.pop().arena.close()
        self._keeps_captured = False  # called again, if members have not changed after all

    def _release_memory(self) -> None:
        if self._has_work_ended():
            if all(each.arena is not self._arena for each in self._captured):
                self._arena.close()
            self._gpu.collect_garbage()
            return
        leak((self, self._captured))  # the device may still use it
        self._captured = []
        warnings.warn(
            f"work that a communicator launched on {self._device} has not completed within {self._ending_s:.1f} s: "
            f"kernels of another library have not finished, or the device has failed. The communicator's memory is not "
            f"released",
            stacklevel=2,
        )

    def _has_work_ended(self) -> bool:
        try:
            if self._drain is None:
                streams = [*self._order.streams, self._gpu.current_stream()]
                self._drain = Drain(streams, self._ending_s)
            return self._drain.is_complete()
        except RuntimeError:  # from CUDA: this device's state is unknown
            return False

    def _device_stall(self) -> Stall | None:
        if self._network and self._network.nccl_watchdog.stall:
            return self._network.nccl_watchdog.stall
        arena = self._arena
        if arena.has_failed:
            return stall_of(arena.failure, arena.node_ranks)
        of_captured = (each.stall(self._topology) for each in self._captured)
        return next(filter(None, of_captured), None)

    def _run(self, tasks: Sequence[Task]) -> None:
        run_tasks(tasks, self._watchdog)
        self._watchdog.check_device()  # what is awaited also ends when the device gives up

    def _streams(self, stream: torch.cuda.Stream) -> DeviceSegmentChannels:
        return DeviceSegmentChannels(self._memory, self._context, self._network, stream)


def _joined(pieces: Sequence[torch.Tensor], num_sms: int | None) -> torch.Tensor:
    """Return pieces one behind the other: one kernel copies them, or with a limit of SMs the driver, one by one."""
    if num_sms is None:
        return torch.cat(list(pieces))
    joined = pieces[0].new_empty(sum(map(len, pieces)))
    for part, piece in zip(joined.split(list(map(len, pieces))), pieces, strict=True):
        part.copy_(piece)
    return joined
