"""Byte streams of segments: through rings in device memory within a node, one message per rank between nodes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from functools import partial

import torch

from fusco.control.node_memory import NodeMemory
from fusco.core.errors import Stall
from fusco.core.segments import Segments
from fusco.cuda.between_nodes.network import Network, messages_of
from fusco.cuda.context import CudaContext
from fusco.cuda.kernels.copy_segments import copy_segments
from fusco.cuda.memory.arena import Arena
from fusco.engine.byte_stream import in_turn
from fusco.engine.tasks import Task

# Of source and its offsets, target and its offsets, and sizes; see ``copy_segments``.
Copy = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]


class _RingTask:
    """Slices of segments that pass one by one through a ring between two ranks of the node.

    ``_flag`` is this rank's count of the slots that it has filled or emptied. Each look at the ring announces those
    whose copies are complete.
    """

    def __init__(self, segments: Segments, memory: NodeMemory, arena: Arena, peer: int, flag: int, copy: Copy) -> None:
        self._memory, self._arena, self._peer, self._flag, self._copy = memory, arena, peer, flag, copy
        self._peers_flags = memory.flags[arena.node_ranks.index(peer)]
        slice_bytes = arena.layout.slot_bytes
        self._segments, self._slices = segments.memory, segments.slices(slice_bytes)
        self._num_copied, self._num_slices = 0, -(-segments.total_bytes // slice_bytes)
        self._num_announced = self._num_passed = memory.own.load(flag)
        self._copies: deque[torch.cuda.Event] = deque()

    def _count_copy(self) -> None:
        self._num_copied += 1
        self._num_passed += 1
        self._copies.append(self._arena.gpu.current_stream().record_event())

    def _has_announced_all(self) -> bool:
        while self._copies and self._copies[0].query():
            self._copies.popleft()
            self._num_announced += 1
            self._memory.own.store(self._flag, self._num_announced)
        return not self._copies


class SegmentSender(_RingTask):
    """Task that gathers segments slice by slice into the ring to a rank."""

    def __init__(self, segments: Segments, memory: NodeMemory, arena: Arena, dst: int, copy: Copy) -> None:
        self._consumer = arena.node_ranks.index(dst)
        super().__init__(segments, memory, arena, dst, memory.layout.produced_flag(self._consumer), copy)

    @property
    def _num_waiting(self) -> int:
        """Messages that the consumer has not taken yet."""
        return self._num_passed - self._peers_flags.load(self._memory.layout.consumed_flag(self._arena.local))

    def step(self) -> bool:
        self._has_announced_all()
        if self._num_copied == self._num_slices or self._num_waiting >= self._arena.layout.ring_depth:
            return False
        slot, piece = self._arena.ring_slot(self._arena.local, self._consumer, self._num_passed), next(self._slices)
        self._copy(self._segments, piece.offset_bytes, slot, piece.packed_offset_bytes, piece.num_bytes)
        self._count_copy()
        return True

    @property
    def is_done(self) -> bool:
        return self._num_copied == self._num_slices and self._has_announced_all() and not self._num_waiting

    def stall(self) -> Stall:
        expected, seen = f"{self._num_slices} slices taken", f"{self._num_copied} sent"
        return Stall("gathering and sending", (self._peer,), expected, seen)


class SegmentReceiver(_RingTask):
    """Task that scatters slices from the ring of a ``SegmentSender`` to segments."""

    def __init__(self, segments: Segments, memory: NodeMemory, arena: Arena, src: int, copy: Copy) -> None:
        self._producer = arena.node_ranks.index(src)
        super().__init__(segments, memory, arena, src, memory.layout.consumed_flag(self._producer), copy)

    def step(self) -> bool:
        self._has_announced_all()
        num_produced = self._peers_flags.load(self._memory.layout.produced_flag(self._arena.local))
        if self._num_copied == self._num_slices or num_produced <= self._num_passed:
            return False
        slot, piece = self._arena.ring_slot(self._producer, self._arena.local, self._num_passed), next(self._slices)
        self._copy(slot, piece.packed_offset_bytes, self._segments, piece.offset_bytes, piece.num_bytes)
        self._count_copy()
        return True

    @property
    def is_done(self) -> bool:
        return self._num_copied == self._num_slices and self._has_announced_all()

    def stall(self) -> Stall:
        return Stall("receiving and scattering", (self._peer,), f"{self._num_slices} slices", f"{self._num_copied}")


class NetworkExchange:
    """All streams to and from ranks of other nodes: packed, sent concurrently, unpacked when all have arrived."""

    def __init__(
        self, send: Mapping[int, Segments], receive: Mapping[int, Segments], network: Network, copy: Copy
    ) -> None:
        self._copy, self._receive, self._gpu = copy, receive, network.gpu
        self._peers = tuple(dict.fromkeys((*send, *receive)))
        caller = network.gpu.current_stream()
        outgoing = {dst: self._packed(segments) for dst, segments in send.items()}
        self._incoming = {src: _room_for(segments) for src, segments in receive.items()}
        self._messages = [*outgoing.values(), *self._incoming.values()]  # must live until they have been sent
        network.stream.wait_stream(caller)
        self._has_arrived = network.exchange(
            messages_of(outgoing.items()), messages_of(self._incoming.items()), "segments"
        )
        self._has_unpacked: torch.cuda.Event | None = None

    def step(self) -> bool:
        """Unpack once everything has arrived."""
        if self._has_unpacked or not self._has_arrived.query():
            return False
        for src, segments in self._receive.items():
            at, message = segments.descriptors, self._incoming[src]
            self._copy(message, at.packed_offset_bytes, segments.memory, at.offset_bytes, at.num_bytes)
        self._has_unpacked = self._gpu.current_stream().record_event()
        return True

    @property
    def is_done(self) -> bool:
        return self._has_unpacked is not None and self._has_unpacked.query()

    def stall(self) -> Stall:
        return Stall("exchanging segments between nodes", self._peers, "all of them", "not all")

    def _packed(self, segments: Segments) -> torch.Tensor:
        at, message = segments.descriptors, _room_for(segments)
        self._copy(segments.memory, at.offset_bytes, message, at.packed_offset_bytes, at.num_bytes)
        return message


class DeviceSegmentChannels:
    """Factory of the tasks of byte streams for one call, which launches on one stream."""

    def __init__(
        self, memory: NodeMemory, context: CudaContext, network: Network | None, stream: torch.cuda.Stream
    ) -> None:
        self._memory, self._arena, self._network = memory, context.arena, network
        self._copy = partial(copy_segments, context.launcher(stream))

    def tasks(self, send: Mapping[int, Segments], receive: Mapping[int, Segments]) -> list[Task]:
        rank, tasks = self._arena.rank, list[Task]()
        remote_send, remote_receive = self._on_other_nodes(send), self._on_other_nodes(receive)
        if self._network and (remote_send or remote_receive):
            tasks.append(NetworkExchange(remote_send, remote_receive, self._network, self._copy))
        for dst, segments in in_turn(rank, send):
            if dst not in remote_send:
                tasks.append(SegmentSender(segments, self._memory, self._arena, dst, self._copy))
        for src, segments in in_turn(rank, receive):
            if src not in remote_receive:
                tasks.append(SegmentReceiver(segments, self._memory, self._arena, src, self._copy))
        return tasks

    def _on_other_nodes(self, partners: Mapping[int, Segments]) -> dict[int, Segments]:
        return {peer: segments for peer, segments in partners.items() if peer not in self._arena.node_ranks}


def _room_for(segments: Segments) -> torch.Tensor:
    return torch.empty(segments.total_bytes, dtype=torch.uint8, device=segments.base.device)
