"""Tasks of ``all_to_all`` and of byte streams: flows within the node through its rings, between nodes over TCP.

Ranks do not synchronise between stages. A rank sends its stages in order, and posts receives in order, a few messages
further ahead than messages are sent: one that is late does not hold up those of other ranks. A message that no receive
waits for gets no further than the socket buffers of the two ranks. So messages of a much later stage stay at their
sender, but for a few MiB.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
import torch

from fusco.control.counters import Counters
from fusco.control.transport import Ticket, Transport
from fusco.core.errors import Stall
from fusco.core.profile import CallProfile
from fusco.core.segments import Segments
from fusco.cpu.channel import RingIn, RingOut
from fusco.cpu.kernels.segment_memory import ContiguousMemory, JoinedPieces, JoinedSegments
from fusco.cpu.memory import CpuMemory
from fusco.engine.all_to_all import FlowSlice, cut_flow
from fusco.engine.tasks import Task, in_turn
from fusco.schedule.rank_schedule import INPUT, NUM_BYTES, OFFSET, OUTPUT, Flow, RankSchedule

# Contiguous, uint8, or segments.
ByteMemory = torch.Tensor | JoinedSegments


class Staging:
    """Memories of a rank in an all-to-all, and how far their regions are filled."""

    def __init__(self, memories: Sequence[ByteMemory], num_regions: int) -> None:
        """``memories`` are in the order of ``fusco.schedule.rank_schedule``."""
        self._memories = memories
        self._pieces = [
            memory if isinstance(memory, JoinedSegments) else ContiguousMemory(memory.data_ptr()) for memory in memories
        ]
        self._filled = [0] * num_regions

    def is_there(self, message: FlowSlice) -> bool:
        """Return True if all bytes of a message have arrived in its source memory."""
        return all(span.region < 0 or self._filled[span.region] >= span.end for span in message.spans)

    def in_place(self, message: FlowSlice) -> torch.Tensor | None:
        """Return the memory of a message if it is one span of a tensor or of a piece; else ``None``."""
        span = message.spans[0]
        memory = self._memories[span.memory]
        if len(message.spans) > 1:
            return None
        if isinstance(memory, JoinedPieces):
            return memory.view(span.offset, span.num_bytes)
        return None if isinstance(memory, JoinedSegments) else memory[span.offset : span.end]

    def gather(self, message: FlowSlice, slot: torch.Tensor) -> None:
        """Copy a message to the first bytes of a slot."""
        target = slot.data_ptr()
        for span in message.spans:
            self._pieces[span.memory].read(span.offset, span.num_bytes, target)
            target += span.num_bytes

    def scatter(self, slot: torch.Tensor, message: FlowSlice) -> None:
        """Copy a message from the first bytes of a slot to its spans; call ``mark_filled`` afterwards."""
        source = slot.data_ptr()
        for span in message.spans:
            self._pieces[span.memory].write(span.offset, span.num_bytes, source)
            source += span.num_bytes

    def mark_filled(self, message: FlowSlice) -> None:
        """Record that the bytes of a message are in their spans."""
        for span in message.spans:
            if span.region >= 0:
                self._filled[span.region] = span.end


class _FlowTask:
    """Messages of a list of flows, in order, and the memories that they are read from or written to."""

    phase: ClassVar[str]

    def __init__(self, flows: Sequence[Flow], staging: Staging, slice_bytes: int) -> None:
        self._staging = staging
        self._peers = tuple(dict.fromkeys(flow.peer for flow in flows))
        self._num_messages = sum(-(-flow.total_bytes // slice_bytes) for flow in flows)
        self._num_taken = 0
        self._messages: Iterator[FlowSlice] = (message for flow in flows for message in cut_flow(flow, slice_bytes))
        self._next = next(self._messages, None)

    def _take(self) -> None:
        self._num_taken += 1
        self._next = next(self._messages, None)

    def awaited(self) -> tuple[int, int] | None:
        """Return the address of a counter, and its value once the task can advance; ``None`` if no counter says so."""
        return None

    def stall(self) -> Stall:
        return Stall(self.phase, self._peers, f"{self._num_messages} messages", f"{self._num_taken}")


class SendWithin(_FlowTask):
    """Task that copies messages for another rank of the node into the ring between the two."""

    phase = "sending within the node"

    def __init__(self, flows: Sequence[Flow], staging: Staging, ring: RingOut, slice_bytes: int) -> None:
        super().__init__(flows, staging, slice_bytes)
        self._ring = ring

    def step(self) -> bool:
        """Copy one message, if it has arrived here and the ring has room."""
        message = self._next
        if message is None or not self._staging.is_there(message) or (slot := self._ring.slot()) is None:
            return False
        self._staging.gather(message, slot)
        self._ring.commit()
        self._take()
        return True

    def awaited(self) -> tuple[int, int] | None:
        if self._next is None:
            return self._ring.awaited(0)
        return self._ring.awaited(self._ring.depth - 1) if self._staging.is_there(self._next) else None

    @property
    def is_done(self) -> bool:
        return self._next is None and self._ring.is_drained


class ReceiveWithin(_FlowTask):
    """Task that takes messages of another rank of the node from the ring between the two."""

    phase = "receiving within the node"

    def __init__(
        self, flows: Sequence[Flow], staging: Staging, ring: RingIn, slice_bytes: int, profile: CallProfile
    ) -> None:
        super().__init__(flows, staging, slice_bytes)
        self._ring, self._profile = ring, profile

    def step(self) -> bool:
        message = self._next
        if message is None or (slot := self._ring.message()) is None:
            return False
        self._staging.scatter(slot, message)
        self._staging.mark_filled(message)
        self._ring.release()
        self._profile.intranode_row_bytes += message.num_bytes
        self._take()
        return True

    def awaited(self) -> tuple[int, int] | None:
        return self._ring.awaited if self._next is not None else None

    @property
    def is_done(self) -> bool:
        return self._next is None


class SendAcross(_FlowTask):
    """Task that sends messages to other nodes, without a copy if one is contiguous in memory."""

    phase = "sending to other nodes"

    def __init__(
        self,
        flows: Sequence[Flow],
        staging: Staging,
        transport: Transport,
        slots: list[torch.Tensor],
        profile: CallProfile,
    ) -> None:
        """``slots`` limit the number of messages that are on the network at once; other tasks may share the list."""
        super().__init__(flows, staging, len(slots[0]))
        self._transport, self._profile, self._free = transport, profile, slots
        self._in_flight: list[tuple[Ticket, torch.Tensor]] = []

    def step(self) -> bool:
        """Send one message, if it has arrived here and a slot is free."""
        has_freed = self._reap()
        message = self._next
        if message is None or not self._free or not self._staging.is_there(message):
            return has_freed
        slot = self._free.pop()
        bytes_ = self._staging.in_place(message)
        if bytes_ is None:
            self._staging.gather(message, slot)
            bytes_ = slot[: message.num_bytes]
        self._in_flight.append((self._transport.send(bytes_, message.peer), slot))
        self._profile.internode_row_bytes += message.num_bytes
        self._take()
        return True

    def _reap(self) -> bool:
        sent, self._in_flight = self._in_flight, []
        for ticket, slot in sent:
            if ticket.is_done:
                self._free.append(slot)
            else:
                self._in_flight.append((ticket, slot))
        return len(self._in_flight) < len(sent)

    @property
    def is_done(self) -> bool:
        return self._next is None and not self._in_flight


class _PostedReceive(NamedTuple):
    ticket: Ticket
    message: FlowSlice
    slot: torch.Tensor
    is_in_slot: bool


class ReceiveAcross(_FlowTask):
    """Task that receives messages from other nodes, without a copy if one is contiguous in memory."""

    phase = "receiving from other nodes"

    def __init__(
        self, flows: Sequence[Flow], staging: Staging, transport: Transport, slots: Sequence[torch.Tensor]
    ) -> None:
        """``slots`` limit the number of receives that are posted at once."""
        super().__init__(flows, staging, len(slots[0]))
        self._transport, self._free = transport, list(slots)
        self._posted: list[_PostedReceive] = []
        self._post()

    def step(self) -> bool:
        """Put received messages into their spans, and post more receives."""
        late: set[int] = set()
        posted, self._posted = self._posted, []
        for receive in posted:
            message = receive.message
            # Messages of one rank arrive in order and must be recorded in order; a later one may complete meanwhile.
            if message.peer in late or not receive.ticket.is_done:
                late.add(message.peer)
                self._posted.append(receive)
                continue
            if receive.is_in_slot:
                self._staging.scatter(receive.slot, message)
            self._staging.mark_filled(message)
            self._free.append(receive.slot)
        has_received = len(self._posted) < len(posted)
        self._post()
        return has_received

    def _post(self) -> None:
        while self._free and (message := self._next) is not None:
            slot, place = self._free.pop(), self._staging.in_place(message)
            ticket = self._transport.receive(slot[: message.num_bytes] if place is None else place, message.peer)
            self._posted.append(_PostedReceive(ticket, message, slot, place is None))
            self._take()

    @property
    def is_done(self) -> bool:
        return self._next is None and not self._posted

    def stall(self) -> Stall:
        peers = tuple(dict.fromkeys(receive.message.peer for receive in self._posted))
        num_received = self._num_taken - len(self._posted)
        return Stall(self.phase, peers, f"{self._num_messages} messages", f"{num_received}")


class CopyOwn:
    """Task that copies the rank's message to itself, one slice at a time."""

    def __init__(self, rank_schedule: RankSchedule, memories: Sequence[ByteMemory], slice_bytes: int) -> None:
        source, target = (pieces[0].tolist() for pieces in rank_schedule.own)
        from_, to = memories[INPUT], memories[OUTPUT]
        assert isinstance(from_, torch.Tensor), "segments for this rank itself are no part of a schedule"
        assert isinstance(to, torch.Tensor), "segments of this rank itself are no part of a schedule"
        self._source = from_[source[OFFSET] :][: source[NUM_BYTES]]
        self._target = to[target[OFFSET] :][: target[NUM_BYTES]]
        self._num_copied, self._slice_bytes = 0, slice_bytes

    def step(self) -> bool:
        piece = slice(self._num_copied, self._num_copied + self._slice_bytes)
        self._target[piece].copy_(self._source[piece])
        self._num_copied += self._slice_bytes
        return True

    @property
    def is_done(self) -> bool:
        return self._num_copied >= len(self._source)

    def stall(self) -> Stall:
        """Return an empty stall: this task never waits."""
        return Stall("copying", (), "", "")


@dataclass(frozen=True)
class Exchanges:
    """Makes the tasks by which a rank exchanges bytes with others."""

    memory: CpuMemory
    transport: Transport  # between nodes
    private: torch.Tensor  # the rank's slots outside shared memory (``CpuLayout.num_private_slots``)

    def of_schedule(
        self, rank_schedule: RankSchedule, memories: Sequence[ByteMemory], profile: CallProfile
    ) -> list[Task]:
        """Return the tasks of a rank schedule, whose order and sizes ``memories`` have."""
        depth, slice_bytes = self.memory.layout.settings.ring_depth, self.memory.layout.slot_bytes
        staging = Staging(memories, rank_schedule.num_regions)
        tasks: list[Task] = [
            ReceiveAcross(rank_schedule.receives_across, staging, self.transport, list(self.private[depth:])),
            SendAcross(rank_schedule.sends_across, staging, self.transport, list(self.private[:depth]), profile),
        ]
        for peer, flows in rank_schedule.receives_within.items():
            tasks.append(ReceiveWithin(flows, staging, RingIn(self.memory, peer), slice_bytes, profile))
        for peer, flows in rank_schedule.sends_within.items():
            tasks.append(SendWithin(flows, staging, RingOut(self.memory, peer), slice_bytes))
        if isinstance(memories[INPUT], JoinedSegments):
            return tasks
        return [*tasks, CopyOwn(rank_schedule, memories, slice_bytes)]

    def of_segments(
        self, send: Mapping[int, Segments], receive: Mapping[int, Segments], profile: CallProfile
    ) -> list[Task]:
        """Return the tasks that send segments to some ranks and receive segments from some, each by itself.

        They may be of this rank, too, which the profile does not count.
        """
        memory, depth, slice_bytes = self.memory, self.memory.layout.settings.ring_depth, self.memory.layout.slot_bytes
        remote = [rank for rank in range(memory.layout.topology.world_size) if rank not in memory.ranks]
        sending, tasks = list(self.private[:depth]), list[Task]()
        for dst, segments in in_turn(memory.rank, send):
            stream = _stream(dst, segments)
            if dst in memory.ranks:
                tasks.append(SendWithin(*stream, RingOut(memory, dst), slice_bytes))
            else:
                tasks.append(SendAcross(*stream, self.transport, sending, profile))
        for src, segments in in_turn(memory.rank, receive):
            stream, counted = _stream(src, segments), CallProfile() if src == memory.rank else profile
            if src in memory.ranks:
                tasks.append(ReceiveWithin(*stream, RingIn(memory, src), slice_bytes, counted))
            else:
                first = depth + 2 * remote.index(src)
                tasks.append(ReceiveAcross(*stream, self.transport, list(self.private[first : first + 2])))
        return tasks


def awaited_counters(tasks: Sequence[Task]) -> Counters:
    """Return the counters of which one has its value once a task can advance that waits for no socket."""
    flows = [task for task in tasks if isinstance(task, _FlowTask) and not task.is_done]
    found = [each for task in flows if (each := task.awaited())]
    return np.array(found, np.int64).reshape(-1, 2)


def _stream(peer: int, segments: Segments) -> tuple[list[Flow], Staging]:
    """Return segments as one flow to or from a rank."""
    pieces = np.array([[INPUT, 0, segments.total_bytes, -1]])
    return [Flow(peer, -1, pieces)], Staging([JoinedSegments([segments])], num_regions=0)
