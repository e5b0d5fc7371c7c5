"""Ranks of several nodes with simulated devices: all that the CUDA engine launches but kernels, NCCL and records."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from native_functions import Native
from simulated_device import Event, Machine, OnDevice, SimulatedGpu, Stream
from simulated_kernels import NodeWords, SimulatedLibrary

from fusco.api.collective import run_collective
from fusco.bench.host.null_device import SharedMemory
from fusco.control.fingerprint import CollectiveFingerprint, Fields, check_fingerprints
from fusco.core.access import Access
from fusco.core.config import Launch, StaticRows
from fusco.core.errors import Stall
from fusco.core.placement import ExpertPlacement
from fusco.core.profile import Call, CallProfile
from fusco.cuda.between_nodes.nccl import Message
from fusco.cuda.between_nodes.network import PreparedMessages
from fusco.cuda.between_nodes.shuffle import InternodeShuffle
from fusco.cuda.context import CudaContext
from fusco.cuda.kernels.copy_experts import bytes_of_experts
from fusco.cuda.kernels.program import NativeCall
from fusco.cuda.memory.arena import Arena
from fusco.cuda.memory.layout import DeviceLayout
from fusco.cuda.within_node.device_plan import DevicePlan
from fusco.cuda.within_node.own_rows import OwnRows
from fusco.cuda.within_node.planning import DevicePlanner
from fusco.cuda.within_node.shuffle import IntranodeShuffle
from fusco.engine.base import CombineRequest, DispatchOutput, DispatchRequest, Pending, RedispatchRequest
from fusco.planner.balancer import BALANCERS
from fusco.planner.routing import Routing


class AllGathers:
    """All-gathers of a world, one after the other; each blocks until all ranks have taken part."""

    def __init__(self, machine: Machine, num_ranks: int) -> None:
        self.machine, self._num_ranks = machine, num_ranks
        self._num_met = [0] * num_ranks
        self._brought: list[dict[int, Any]] = []

    def all_gather(self, rank: int, thing: Any) -> list[Any]:
        number = self._num_met[rank]
        self._num_met[rank] += 1
        if number == len(self._brought):
            self._brought.append({})
        here = self._brought[number]
        here[rank] = thing
        self.machine.wait(lambda: len(here) == self._num_ranks)
        return [here[r] for r in range(self._num_ranks)]


@dataclass
class RecordExchange:
    """What one rank sends and receives side by side; begun, when the stream has come to it, and what has arrived."""

    sends: Sequence[Message]
    receives: Sequence[Message]
    has_begun: bool = False
    has_received: bool = False


class SimulatedNccl:
    """All ranks' messages. They are copied some time between the moment when both ends have begun and the end."""

    def __init__(self, machine: Machine, num_ranks: int) -> None:
        self._machine = machine
        self.exchanges: list[list[RecordExchange]] = [[] for _ in range(num_ranks)]

    def exchange(self, rank: int, sends: Sequence[Message], receives: Sequence[Message], stream: Stream) -> None:
        number, exchange = len(self.exchanges[rank]), RecordExchange(sends, receives)
        self.exchanges[rank].append(exchange)

        def of(peer: int) -> RecordExchange | None:
            known = self.exchanges[peer]
            return known[number] if number < len(known) else None

        def begin() -> None:
            exchange.has_begun = True

        def have_senders_begun() -> bool:
            return all((there := of(message.peer)) is not None and there.has_begun for message in receives)

        def receive() -> None:
            for src in {message.peer for message in receives}:
                there = of(src)
                assert there
                self._copy(
                    [message for message in there.sends if message.peer == rank],
                    [message for message in receives if message.peer == src],
                )
            exchange.has_received = True

        def have_receivers_received() -> bool:
            return all((there := of(message.peer)) is not None and there.has_received for message in sends)

        stream.launch("beginning messages", begin)
        stream.launch("receiving messages", receive, have_senders_begun)
        stream.launch("sending messages", lambda: None, have_receivers_received)

    def _copy(self, sent: Sequence[Message], received: Sequence[Message]) -> None:
        sizes, expected = ([message.num_bytes for message in messages] for messages in (sent, received))
        assert sizes == expected, f"messages of {sizes} bytes were sent, of {expected} bytes expected"
        for source, target in zip(sent, received, strict=True):
            shape = (source.num_bytes,)
            rows = self._machine.at(source.address, torch.uint8, shape)
            self._machine.at(target.address, torch.uint8, shape).copy_(rows)


class SimulatedNetwork:
    """Replaces ``Network``."""

    def __init__(self, nccl: SimulatedNccl, rank: int, gpu: SimulatedGpu) -> None:
        self.gpu, self.stream = gpu, gpu.new_stream()
        self._nccl, self._rank = nccl, rank

    def exchange(
        self, sends: Sequence[Message], receives: Sequence[Message], what: str, stream: Stream | None = None
    ) -> Event:
        assert all(message.num_bytes for message in (*sends, *receives)), what
        stream = stream or self.stream
        self._nccl.exchange(self._rank, sends, receives, stream)
        return stream.record_event()

    def prepare(
        self, sends: Sequence[Message], receives: Sequence[Message], what: str, stream: Stream
    ) -> PreparedMessages:
        group: tuple[list[Message], list[Message]] = ([], [])

        def add(address: int, num_bytes: int, peer: int, kind: int) -> None:
            assert num_bytes, what
            group[kind].append(Message(peer, address, num_bytes))

        def end() -> None:
            self._nccl.exchange(self._rank, *map(tuple, group), stream)
            for messages in group:
                messages.clear()

        adding, ending = Native(add, 4), Native(end, 0)
        calls = [
            NativeCall(adding.address, (message.address, message.num_bytes, message.peer, kind), adding.fail)
            for kind, messages in enumerate((sends, receives))
            for message in messages
        ]
        calls.append(NativeCall(ending.address, (), ending.fail))
        return PreparedMessages(calls, Stall("the network", (), what, "nothing"))

    def launch(self, call: Callable[[], int], _stall: Stall, _is_done: object, let_go: object = None) -> int:
        """Events are not used again: the machine may be behind the host, and so may a wait for them."""
        return call()


class SimulatedSession:
    """Replaces ``Session``."""

    has_published = False

    def __init__(self, gathers: AllGathers, rank: int) -> None:
        self.profile = CallProfile()
        self._gathers, self._rank, self._num_calls = gathers, rank, 0
        self.machine = gathers.machine
        self.access = Access(f"rank {rank}'s simulated communicator")

    def begin(self, operation: str) -> Call:
        self._num_calls += 1
        self.profile = CallProfile(operation)

        def agree_again(fields: Fields) -> int:
            self.agree(CollectiveFingerprint(operation, fields))
            return self._num_calls

        return Call(self._num_calls, self.profile, agree_again)

    def leave(self, operation: str, error: BaseException | None = None) -> None:
        pass

    def agree(
        self,
        fingerprint: CollectiveFingerprint,
        counts: Sequence[int] = (),
        handle: int = 0,
        attachments: Mapping[int, object] | None = None,
    ) -> list[tuple[int, ...]]:
        assert not attachments, "on CUDA nothing is attached to records"
        fingerprint = CollectiveFingerprint.decode(fingerprint.text, handle)
        gathered = self._gathers.all_gather(self._rank, (fingerprint, tuple(counts)))
        check_fingerprints([fingerprint for fingerprint, _ in gathered], self._rank)
        return [counts for _, counts in gathered]


class SimulatedWatch:
    """Mock of ``Watchdog``: no rank is ever late."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def wait_until(self, is_ready: Callable[[], bool], stall: Callable[[], Any]) -> None:
        stall()
        self._machine.wait(is_ready)

    def check_device(self) -> None:
        """No device fails."""


@dataclass
class Roll:
    rank: int


@dataclass
class Rank:
    """One rank of a simulated world; ``stream`` is the caller's."""

    rank: int
    arena: Arena
    context: CudaContext
    shuffle: Any  # within a node or between nodes
    stream: Stream
    session: SimulatedSession
    library: Any
    engine = SimpleNamespace(pending_error=lambda: None)

    def machine_is_idle(self) -> None:
        """Wait, on the host, for all that the caller's stream has."""
        self.session.machine.wait(lambda: self.stream.is_idle)

    @property
    def profile(self) -> CallProfile:
        """Of the latest collective."""
        return self.session.profile

    def dispatch(self, request: DispatchRequest) -> DispatchOutput[Any]:
        return run_collective(
            self.session,
            self.engine,
            "dispatch",
            lambda: request,
            lambda request, call: self.shuffle.prepare_dispatch(request, call, self.stream),
        )

    def dispatch_again(
        self, plan: DevicePlan, payloads: Sequence[torch.Tensor], launch: Launch | None = None
    ) -> list[torch.Tensor]:
        request = RedispatchRequest(payloads=payloads, plan=plan, handle=1, launch=launch or Launch())

        def prepare(request: RedispatchRequest[Any], call: Call) -> Pending[list[torch.Tensor]]:
            def run(_: object) -> list[torch.Tensor]:
                with call.profile.spend("wire"):  # as the engine does
                    return self.shuffle.redispatch(request, call, self.stream)

            return Pending((), run)

        return run_collective(self.session, self.engine, "dispatch_again", lambda: request, prepare)

    def combine(
        self, plan: DevicePlan, rows: torch.Tensor, launch: Launch | None = None, *, is_weighted: bool
    ) -> torch.Tensor:
        """Hosts do not wait for each other: the more orders are possible in which devices run."""
        weights = plan.weights if is_weighted else None
        request = CombineRequest(rows=[rows], plan=plan, topk_weights=weights, handle=1, launch=launch or Launch())
        (sums,) = self.shuffle.combine(request, self.session.begin("combine"), self.stream)
        return sums


def request_of(
    routing: Routing,
    payload: torch.Tensor,
    placement: ExpertPlacement,
    *,
    static: StaticRows | None = None,
    alignment=1,
) -> DispatchRequest:
    """A dispatch of one payload, of which each rank sends its own rows."""
    return DispatchRequest(
        routing=routing,
        payloads=[payload],
        placement=placement,
        balancer=BALANCERS["static"],
        expert_alignment=alignment,
        static=static,
        launch=Launch(),
    )


class World:
    """All ranks of a layout's topology."""

    def __init__(
        self,
        layout: DeviceLayout,
        placement: ExpertPlacement,
        machine: Machine,
        library: Callable[[], Any] | None = None,
    ) -> None:
        """``library`` makes each rank's stand-in for ``Library``; ``None`` means the kernels' twins."""
        self.layout, self.placement, self.machine, self._library = layout, placement, machine, library
        topology = layout.topology
        self._words = [NodeWords(layout.num_ranks) for _ in range(topology.num_nodes)]
        self._records, self._buffers = (AllGathers(machine, topology.world_size) for _ in range(2))
        self.nccl = SimulatedNccl(machine, topology.world_size)

    def run(self, program: Callable[[Rank], Any]) -> list[Any]:
        """Run a program on every rank; returns what it returns, once all that it launched is done."""

        def on_rank(rank: int) -> Any:
            gpu = SimulatedGpu(self.machine)
            gpu.share = self._share
            with OnDevice(self.machine, gpu.stream):
                return program(self._start(rank, gpu))

        return self.machine.run(on_rank, self.layout.topology.world_size)

    def _share(self, memory: torch.Tensor, store_gather: Roll, ranks: Sequence[int], name: str) -> SharedMemory:
        gathered = self._buffers.all_gather(store_gather.rank, (name, memory))
        assert {other for other, _ in gathered} == {name}
        return SharedMemory([gathered[rank][1] for rank in ranks])

    def _start(self, rank: int, gpu: SimulatedGpu) -> Rank:
        layout, machine = self.layout, self.machine
        num_bytes = layout.offsets["end"] + bytes_of_experts(layout.num_ranks, self.placement.num_experts, 0)
        memory = torch.zeros(num_bytes, dtype=torch.uint8)
        arena = Arena(layout, memory, Roll(rank), gpu)
        words = self._words[layout.topology.rank_to_node[rank]]
        library = self._library() if self._library else SimulatedLibrary(machine, words)
        context = CudaContext.of(library, arena, self.placement, SimulatedWatch(machine))
        session = SimulatedSession(self._records, rank)
        planner, own_rows = DevicePlanner(context), OwnRows(context)
        shuffle: Any = IntranodeShuffle(context, planner, own_rows)
        if layout.topology.num_nodes > 1:
            network = SimulatedNetwork(self.nccl, rank, gpu)
            shuffle = InternodeShuffle(context, planner, own_rows, network, gpu.new_stream())
        return Rank(rank, arena, context, shuffle, gpu.stream, session, library)
