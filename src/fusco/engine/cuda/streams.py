"""Byte streams of segments between ranks of a node: rings in device memory, counters in the host's."""

from __future__ import annotations

from collections import deque

import torch

from fusco.engine.cuda.arena import Arena
from fusco.engine.cuda.kernels import Kernels
from fusco.engine.host.node_memory import NodeMemory
from fusco.engine.stream import StreamIn, StreamOut
from fusco.segments import Segments


class DeviceRingOut:
    """A ring that a peer reads. A slot is announced once the copy into it is done, which is found out at every look."""

    def __init__(self, memory: NodeMemory, arena: Arena, consumer: int) -> None:
        self._memory, self._arena, self._consumer = memory, arena, consumer
        self._flag = memory.layout.produced_flag(consumer)
        self._num_announced = self._num_filled = memory.own.load(self._flag)
        self._copies: deque[torch.cuda.Event] = deque()

    def slot(self) -> torch.Tensor | None:
        """See ``Outgoing``."""
        self._announce()
        if self._num_filled - self._num_consumed >= self._arena.layout.ring_depth:
            return None
        return self._arena.ring_slot(self._arena.rank, self._consumer, self._num_filled)

    def commit(self, num_bytes: int) -> None:  # noqa: ARG002  the consumer knows the size
        """See ``Outgoing``."""
        self._num_filled += 1
        self._copies.append(_event_after_copy())

    @property
    def is_drained(self) -> bool:
        """See ``Outgoing``."""
        self._announce()
        return self._num_consumed == self._num_filled

    @property
    def _num_consumed(self) -> int:
        return self._memory.flags[self._consumer].load(self._memory.layout.consumed_flag(self._arena.rank))

    def _announce(self) -> None:
        while self._copies and self._copies[0].query():
            self._copies.popleft()
            self._num_announced += 1
            self._memory.own.store(self._flag, self._num_announced)


class DeviceRingIn:
    """The other end of a ``DeviceRingOut``."""

    def __init__(self, memory: NodeMemory, arena: Arena, producer: int) -> None:
        self._memory, self._arena, self._producer = memory, arena, producer
        self._flag = memory.layout.consumed_flag(producer)
        self._num_released = self._num_taken = memory.own.load(self._flag)
        self._copies: deque[torch.cuda.Event] = deque()

    def message(self) -> torch.Tensor | None:
        """See ``Incoming``."""
        self._release()
        produced = self._memory.flags[self._producer].load(self._memory.layout.produced_flag(self._arena.rank))
        if produced <= self._num_taken:
            return None
        return self._arena.ring_slot(self._producer, self._arena.rank, self._num_taken)

    def release(self) -> None:
        """See ``Incoming``."""
        self._num_taken += 1
        self._copies.append(_event_after_copy())

    @property
    def is_released(self) -> bool:
        """See ``Incoming``."""
        self._release()
        return not self._copies

    def _release(self) -> None:
        while self._copies and self._copies[0].query():
            self._copies.popleft()
            self._num_released += 1
            self._memory.own.store(self._flag, self._num_released)


class DeviceStreams:
    """See ``StreamMaker``; all ranks are of one node."""

    def __init__(self, memory: NodeMemory, arena: Arena, kernels: Kernels, device: torch.device) -> None:
        self.device = device
        self._memory, self._arena, self._kernels = memory, arena, kernels

    def outgoing(self, segments: Segments, dst: int) -> StreamOut:
        """See ``StreamMaker``."""
        channel = DeviceRingOut(self._memory, self._arena, dst)
        return StreamOut(segments, channel, dst, self._arena.layout.slot_bytes, self._kernels.copy_segments)

    def incoming(self, segments: Segments, src: int) -> StreamIn:
        """See ``StreamMaker``."""
        channel = DeviceRingIn(self._memory, self._arena, src)
        return StreamIn(segments, channel, src, self._arena.layout.slot_bytes, self._kernels.copy_segments)


def _event_after_copy() -> torch.cuda.Event:
    event = torch.cuda.Event()
    event.record()
    return event
