"""Channels: bounded message rings between two ranks, in shared memory within a node, over TCP between nodes."""

from __future__ import annotations

import torch

from fusco.control.transport import Ticket, Transport
from fusco.cpu.memory import CpuMemory


class RingOut:
    """Sending end of a shared-memory ring to a rank of the node. Counters never reset, so any verb may use it."""

    def __init__(self, memory: CpuMemory, dst: int) -> None:
        self._memory, self._consumer = memory, memory.ranks.index(dst)
        self.depth = memory.layout.settings.ring_depth
        self._flag = memory.layout.control.produced_flag(self._consumer)
        self.num_produced = memory.own.load(self._flag)

    @property
    def num_consumed(self) -> int:
        """Number of messages that the consumer took."""
        return self._memory.flags[self._consumer].load(self._memory.layout.control.consumed_flag(self._memory.local))

    def slot(self) -> torch.Tensor | None:
        if self.num_produced - self.num_consumed >= self.depth:
            return None
        return self._memory.ring_slot(self._memory.local, self._consumer, self.num_produced % self.depth)

    def commit(self) -> None:
        self.num_produced += 1
        self._memory.own.store(self._flag, self.num_produced)

    def awaited(self, num_left: int) -> tuple[int, int]:
        """Return the address of ``num_consumed``, and its value once so many messages are left in the ring."""
        return int(self._memory.rings_out.addresses[self._consumer, 1]), self.num_produced - num_left

    @property
    def is_drained(self) -> bool:
        return self.num_consumed == self.num_produced


class RingIn:
    """Receiving end of a ``RingOut``."""

    def __init__(self, memory: CpuMemory, src: int) -> None:
        self._memory, self._producer = memory, memory.ranks.index(src)
        self._depth = memory.layout.settings.ring_depth
        self._flag = memory.layout.control.consumed_flag(self._producer)
        self.num_consumed = memory.own.load(self._flag)

    @property
    def num_produced(self) -> int:
        """Number of messages that the producer put in."""
        return self._memory.flags[self._producer].load(self._memory.layout.control.produced_flag(self._memory.local))

    @property
    def awaited(self) -> tuple[int, int]:
        """The address of ``num_produced``, and its value once there is a message."""
        return int(self._memory.rings_in.addresses[self._producer, 0]), self.num_consumed + 1

    def message(self) -> torch.Tensor | None:
        if self.num_produced <= self.num_consumed:
            return None
        return self._memory.ring_slot(self._producer, self._memory.local, self.num_consumed % self._depth)

    def release(self) -> None:
        self.num_consumed += 1
        self._memory.own.store(self._flag, self.num_consumed)


class SendRing:
    """Sending end to all ranks of other nodes, which share its private slots; a slot is free once it is sent."""

    def __init__(self, transport: Transport, slots: list[torch.Tensor]) -> None:
        self._transport, self._slots = transport, slots
        self._tickets: list[Ticket | None] = [None] * len(slots)
        self._next = 0

    def slot(self) -> torch.Tensor | None:
        ticket = self._tickets[self._next]
        return self._slots[self._next] if ticket is None or ticket.is_done else None

    def commit(self, num_bytes: int, dst: int) -> None:
        self._tickets[self._next] = self._transport.send(self._slots[self._next][:num_bytes], dst)
        self._next = (self._next + 1) % len(self._slots)

    @property
    def is_drained(self) -> bool:
        return all(ticket is None or ticket.is_done for ticket in self._tickets)
