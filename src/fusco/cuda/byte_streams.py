"""Byte streams of segments: through rings in device memory within a node, one message per rank between nodes."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from functools import partial

import torch

from fusco.control.node_memory import NodeMemory
from fusco.core.errors import Stall
from fusco.core.segments import Segments
from fusco.cuda.arena import Arena
from fusco.cuda.context import CudaContext
from fusco.cuda.kernels.copy_segments import copy_segments
from fusco.cuda.network import Network, messages_of
from fusco.engine.byte_stream import Copy, SegmentReceiver, SegmentSender, in_turn
from fusco.engine.tasks import Task


class DeviceRingOut:
    """Producer's end of a ring. Each poll announces the slots whose copies are complete."""

    def __init__(self, memory: NodeMemory, arena: Arena, consumer: int) -> None:
        self._memory, self._arena, self._consumer = memory, arena, consumer
        self._flag = memory.layout.produced_flag(consumer)
        self._num_announced = self._num_filled = memory.own.load(self._flag)
        self._copies: deque[torch.cuda.Event] = deque()

    def slot(self) -> torch.Tensor | None:
        self._announce()
        if self._num_filled - self._num_consumed >= self._arena.layout.ring_depth:
            return None
        return self._arena.ring_slot(self._arena.local, self._consumer, self._num_filled)

    def commit(self, num_bytes: int, dst: int) -> None:  # noqa: ARG002  the consumer knows the size
        self._num_filled += 1
        self._copies.append(_event_after_copy())

    @property
    def is_drained(self) -> bool:
        self._announce()
        return self._num_consumed == self._num_filled

    @property
    def _num_consumed(self) -> int:
        return self._memory.flags[self._consumer].load(self._memory.layout.consumed_flag(self._arena.local))

    def _announce(self) -> None:
        while self._copies and self._copies[0].query():
            self._copies.popleft()
            self._num_announced += 1
            self._memory.own.store(self._flag, self._num_announced)


class DeviceRingIn:
    """Consumer's end of a ``DeviceRingOut``."""

    def __init__(self, memory: NodeMemory, arena: Arena, producer: int) -> None:
        self._memory, self._arena, self._producer = memory, arena, producer
        self._flag = memory.layout.consumed_flag(producer)
        self._num_released = self._num_taken = memory.own.load(self._flag)
        self._copies: deque[torch.cuda.Event] = deque()

    def message(self) -> torch.Tensor | None:
        self._release()
        produced = self._memory.flags[self._producer].load(self._memory.layout.produced_flag(self._arena.local))
        if produced <= self._num_taken:
            return None
        return self._arena.ring_slot(self._producer, self._arena.local, self._num_taken)

    def release(self) -> None:
        self._num_taken += 1
        self._copies.append(_event_after_copy())

    @property
    def is_released(self) -> bool:
        self._release()
        return not self._copies

    def _release(self) -> None:
        while self._copies and self._copies[0].query():
            self._copies.popleft()
            self._num_released += 1
            self._memory.own.store(self._flag, self._num_released)


class NetworkExchange:
    """All streams to and from ranks of other nodes: packed, sent concurrently, unpacked when all have arrived."""

    def __init__(
        self, send: Mapping[int, Segments], receive: Mapping[int, Segments], network: Network, copy: Copy
    ) -> None:
        self._copy, self._receive = copy, receive
        self._peers = tuple(dict.fromkeys((*send, *receive)))
        caller = torch.cuda.current_stream()
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
        self._has_unpacked = _event_after_copy()
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
        self.device = context.arena.device
        self._memory, self._arena, self._network = memory, context.arena, network
        self._copy = partial(copy_segments, context.launcher(stream))

    def tasks(self, send: Mapping[int, Segments], receive: Mapping[int, Segments]) -> list[Task]:
        rank, local_of, size = self._arena.rank, self._arena.node_ranks.index, self._arena.layout.slot_bytes
        tasks: list[Task] = []
        remote_send, remote_receive = self._on_other_nodes(send), self._on_other_nodes(receive)
        if self._network and (remote_send or remote_receive):
            tasks.append(NetworkExchange(remote_send, remote_receive, self._network, self._copy))
        for dst, segments in in_turn(rank, send):
            if dst not in remote_send:
                ring_out = DeviceRingOut(self._memory, self._arena, local_of(dst))
                tasks.append(SegmentSender(segments, ring_out, dst, size, self._copy))
        for src, segments in in_turn(rank, receive):
            if src not in remote_receive:
                ring_in = DeviceRingIn(self._memory, self._arena, local_of(src))
                tasks.append(SegmentReceiver(segments, ring_in, src, size, self._copy))
        return tasks

    def _on_other_nodes(self, partners: Mapping[int, Segments]) -> dict[int, Segments]:
        return {peer: segments for peer, segments in partners.items() if peer not in self._arena.node_ranks}


def _room_for(segments: Segments) -> torch.Tensor:
    return torch.empty(segments.total_bytes, dtype=torch.uint8, device=segments.base.device)


def _event_after_copy() -> torch.cuda.Event:
    event = torch.cuda.Event()
    event.record()
    return event
