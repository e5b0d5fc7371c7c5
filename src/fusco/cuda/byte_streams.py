"""Byte streams of segments: through rings in device memory within a node, one message per rank between nodes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from functools import partial

import torch

from fusco.control.node_memory import NodeMemory
from fusco.core.errors import Stall
from fusco.core.segments import Descriptors, Segments
from fusco.cuda.between_nodes.network import Network, messages_of
from fusco.cuda.context import CudaContext
from fusco.cuda.kernels.copy_segments import copy_segments
from fusco.cuda.memory.arena import Arena
from fusco.engine.tasks import Task, in_turn

# Of source and its offsets, target and its offsets, and sizes; see ``copy_segments``.
Copy = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]


class _RingTask:
    """Slices of segments that pass through a ring between two ranks of the node.

    A single segment passes by copies of the driver, of up to half a ring at once; others slice by slice. ``flag`` is
    that of this rank's count of the slots that it has filled or emptied. Each look at the ring announces those whose
    copies are complete.
    """

    def __init__(self, segments: Segments, memory: NodeMemory, arena: Arena, peer: int, flag: int, copy: Copy) -> None:
        self._peer, self._copy, self._announce = peer, copy, memory.own.writer(flag)
        self._peers_flags, self._stream = memory.flags[arena.node_ranks.index(peer)], arena.gpu.current_stream()
        self._depth, self._slot_bytes = arena.layout.ring_depth, arena.layout.slot_bytes
        self._segments, self._run = segments.memory, _only_run(segments)
        self._slices = iter(()) if self._run is not None else segments.slices(self._slot_bytes)
        self._num_copied, self._num_slices = 0, -(-segments.total_bytes // self._slot_bytes)
        self._num_passed = memory.own.load(flag)
        self._copies: deque[tuple[int, torch.cuda.Event]] = deque()

    def _pass(self, ring: torch.Tensor, num_slots: int) -> bool:
        """Copy slices to or from at most as many slots of a ring; return whether there were any."""
        slot = self._num_passed % self._depth
        number = min(num_slots, self._num_slices - self._num_copied, self._depth - slot, self._depth // 2)
        if number <= 0:
            return False
        if self._run is None:
            number = 1
            self._copy_slice(ring[slot * self._slot_bytes :], next(self._slices))
        else:
            first = self._num_copied * self._slot_bytes
            piece = self._run[first : first + number * self._slot_bytes]
            self._copy_run(ring[slot * self._slot_bytes :][: len(piece)], piece)
        self._num_copied += number
        self._num_passed += number
        self._copies.append((self._num_passed, self._stream.record_event()))
        return True

    def _copy_slice(self, in_ring: torch.Tensor, piece: Descriptors) -> None:
        raise NotImplementedError

    def _copy_run(self, in_ring: torch.Tensor, piece: torch.Tensor) -> None:
        raise NotImplementedError

    def _has_announced_all(self) -> bool:
        while self._copies and self._copies[0][1].query():
            self._announce(self._copies.popleft()[0])
        return not self._copies


class SegmentSender(_RingTask):
    """Task that gathers segments into the ring to a rank."""

    def __init__(self, segments: Segments, memory: NodeMemory, arena: Arena, dst: int, copy: Copy) -> None:
        consumer = arena.node_ranks.index(dst)
        super().__init__(segments, memory, arena, dst, memory.layout.produced_flag(consumer), copy)
        self._ring = arena.ring(arena.local, consumer)
        self._consumed_flag = memory.layout.consumed_flag(arena.local)

    @property
    def _num_waiting(self) -> int:
        """Slices that the consumer has not taken yet."""
        return self._num_passed - self._peers_flags.load(self._consumed_flag)

    def step(self) -> bool:
        self._has_announced_all()
        return self._num_copied < self._num_slices and self._pass(self._ring, self._depth - self._num_waiting)

    def _copy_slice(self, in_ring: torch.Tensor, piece: Descriptors) -> None:
        self._copy(self._segments, piece.offset_bytes, in_ring, piece.packed_offset_bytes, piece.num_bytes)

    def _copy_run(self, in_ring: torch.Tensor, piece: torch.Tensor) -> None:
        in_ring.copy_(piece)

    @property
    def is_done(self) -> bool:
        return self._num_copied == self._num_slices and self._has_announced_all() and not self._num_waiting

    def stall(self) -> Stall:
        expected, seen = f"{self._num_slices} slices taken", f"{self._num_copied} sent"
        return Stall("gathering and sending", (self._peer,), expected, seen)


class SegmentReceiver(_RingTask):
    """Task that scatters slices from the ring of a ``SegmentSender`` to segments."""

    def __init__(self, segments: Segments, memory: NodeMemory, arena: Arena, src: int, copy: Copy) -> None:
        producer = arena.node_ranks.index(src)
        super().__init__(segments, memory, arena, src, memory.layout.consumed_flag(producer), copy)
        self._ring = arena.ring(producer, arena.local)
        self._produced_flag = memory.layout.produced_flag(arena.local)

    def step(self) -> bool:
        self._has_announced_all()
        return self._pass(self._ring, self._peers_flags.load(self._produced_flag) - self._num_passed)

    def _copy_slice(self, in_ring: torch.Tensor, piece: Descriptors) -> None:
        self._copy(in_ring, piece.packed_offset_bytes, self._segments, piece.offset_bytes, piece.num_bytes)

    def _copy_run(self, in_ring: torch.Tensor, piece: torch.Tensor) -> None:
        piece.copy_(in_ring)

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


def _only_run(segments: Segments) -> torch.Tensor | None:
    """Return the memory of a single segment, ``None`` for others."""
    at = segments.descriptors
    return segments.memory.narrow(0, int(at.offset_bytes), at.total_bytes) if len(at.num_bytes) == 1 else None
