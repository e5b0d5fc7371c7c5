"""The tasks of ``all_to_all``: flows within the node through its rings, one-to-one stages between nodes over gloo.

Nothing is synchronised between stages. A rank sends its stages in order, and posts receives in order, a few messages
at a time, so that a message of a later stage stays with its sender (gloo sends nothing that nobody waits for) until
all but the last few of the stage before it are here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from fusco.core.errors import Stall
from fusco.core.profile import CallProfile
from fusco.cpu.channel import RingIn, RingOut
from fusco.cpu.gloo import GlooTransport, Ticket
from fusco.cpu.memory import CpuMemory
from fusco.cpu.staging import Staging
from fusco.engine.all_to_all import FlowSlice, cut_flow
from fusco.engine.tasks import Task
from fusco.schedule.rank_schedule import INPUT, NUM_BYTES, OFFSET, OUTPUT, Flow, RankSchedule


class MessageQueue:
    """The messages of a list of flows, one after the other."""

    def __init__(self, flows: Sequence[Flow], slice_bytes: int) -> None:
        self.peers = tuple(dict.fromkeys(flow.peer for flow in flows))
        self.num_messages = sum(-(-flow.total_bytes // slice_bytes) for flow in flows)
        self.num_taken = 0
        self._messages: Iterator[FlowSlice] = (message for flow in flows for message in cut_flow(flow, slice_bytes))
        self.next = next(self._messages, None)

    def take(self) -> None:
        """The next message is dealt with."""
        self.num_taken += 1
        self.next = next(self._messages, None)


class SendWithin:
    """Copies messages for another rank of the node into the ring between the two."""

    def __init__(self, flows: Sequence[Flow], staging: Staging, ring: RingOut, slice_bytes: int) -> None:
        self._message_queue, self._staging, self._ring = MessageQueue(flows, slice_bytes), staging, ring

    def step(self) -> bool:
        """Copy one message, if it is there and the ring has room."""
        message = self._message_queue.next
        if message is None or not self._staging.is_there(message) or (slot := self._ring.slot()) is None:
            return False
        self._staging.gather(message, slot)
        self._ring.commit(message.num_bytes)
        self._message_queue.take()
        return True

    @property
    def is_done(self) -> bool:
        """Whether the other rank has everything."""
        return self._message_queue.next is None and self._ring.is_drained

    def stall(self) -> Stall:
        """The other rank does not take messages, or what it shall get is not here yet."""
        return _stall("sending within the node", self._message_queue)


class ReceiveWithin:
    """Takes messages of another rank of the node out of the ring between the two."""

    def __init__(
        self, flows: Sequence[Flow], staging: Staging, ring: RingIn, slice_bytes: int, profile: CallProfile
    ) -> None:
        self._message_queue, self._staging, self._ring = MessageQueue(flows, slice_bytes), staging, ring
        self._profile = profile

    def step(self) -> bool:
        """Take one message, if it is there."""
        message = self._message_queue.next
        if message is None or (slot := self._ring.message()) is None:
            return False
        self._staging.scatter(slot, message)
        self._staging.note(message)
        self._ring.release()
        self._profile.intranode_row_bytes += message.num_bytes
        self._message_queue.take()
        return True

    @property
    def is_done(self) -> bool:
        """Whether everything is here."""
        return self._message_queue.next is None

    def stall(self) -> Stall:
        """The other rank does not send."""
        return _stall("receiving within the node", self._message_queue)


class SendAcross:
    """Sends the stages to other nodes, from where their bytes stand if a message stands there in one piece."""

    def __init__(
        self,
        flows: Sequence[Flow],
        staging: Staging,
        transport: GlooTransport,
        slots: Sequence[torch.Tensor],
        profile: CallProfile,
    ) -> None:
        """As many messages as there are ``slots`` are on the network at once."""
        self._message_queue, self._staging = MessageQueue(flows, len(slots[0])), staging
        self._transport, self._profile = transport, profile
        self._free = list(slots)
        self._leaving: list[tuple[Ticket, torch.Tensor]] = []

    def step(self) -> bool:
        """Send one message, if it is there and not too many are on the network."""
        has_left = self._collect()
        message = self._message_queue.next
        if message is None or not self._free or not self._staging.is_there(message):
            return has_left
        slot = self._free.pop()
        bytes_ = self._staging.in_place(message)
        if bytes_ is None:
            self._staging.gather(message, slot)
            bytes_ = slot[: message.num_bytes]
        self._leaving.append((self._transport.send(bytes_, message.peer), slot))
        self._profile.internode_row_bytes += message.num_bytes
        self._message_queue.take()
        return True

    def _collect(self) -> bool:
        leaving, self._leaving = self._leaving, []
        for ticket, slot in leaving:
            if ticket.is_done:
                self._free.append(slot)
            else:
                self._leaving.append((ticket, slot))
        return len(self._leaving) < len(leaving)

    @property
    def is_done(self) -> bool:
        """Whether every message has left."""
        return self._message_queue.next is None and not self._leaving

    def stall(self) -> Stall:
        """Other nodes do not take messages, or what they shall get is not here yet."""
        return _stall("sending stages", self._message_queue)


class ReceiveAcross:
    """Takes the stages from other nodes in, to where their bytes shall stand if a message does so in one piece."""

    def __init__(
        self, flows: Sequence[Flow], staging: Staging, transport: GlooTransport, slots: Sequence[torch.Tensor]
    ) -> None:
        """As many messages as there are ``slots`` are waited for at once."""
        self._message_queue, self._staging, self._transport = MessageQueue(flows, len(slots[0])), staging, transport
        self._free = list(slots)
        self._coming: list[tuple[Ticket, FlowSlice, torch.Tensor]] = []
        self._post()

    def step(self) -> bool:
        """Put what has come where it belongs, and wait for more."""
        late: set[int] = set()
        coming, self._coming = self._coming, []
        for ticket, message, slot in coming:
            # Those of one rank come in order, and must be noted so, though this one may be done while we look.
            if message.peer in late or not ticket.is_done:
                late.add(message.peer)
                self._coming.append((ticket, message, slot))
                continue
            if len(message.spans) > 1:
                self._staging.scatter(slot, message)
            self._staging.note(message)
            self._free.append(slot)
        has_come = len(self._coming) < len(coming)
        self._post()
        return has_come

    def _post(self) -> None:
        while self._free and (message := self._message_queue.next) is not None:
            slot, place = self._free.pop(), self._staging.in_place(message)
            ticket = self._transport.receive(slot[: message.num_bytes] if place is None else place, message.peer)
            self._coming.append((ticket, message, slot))
            self._message_queue.take()

    @property
    def is_done(self) -> bool:
        """Whether everything is here."""
        return self._message_queue.next is None and not self._coming

    def stall(self) -> Stall:
        """Other nodes do not send."""
        peers = tuple(dict.fromkeys(message.peer for _, message, _ in self._coming))
        num_here = self._message_queue.num_taken - len(self._coming)
        return Stall("receiving stages", peers, f"{self._message_queue.num_messages} messages", f"{num_here}")


class CopyOwn:
    """Copies what a rank has for itself, a slice at a time."""

    def __init__(self, rank_schedule: RankSchedule, memories: Sequence[torch.Tensor], slice_bytes: int) -> None:
        source, target = (pieces[0].tolist() for pieces in rank_schedule.own)
        self._source = memories[INPUT][source[OFFSET] :][: source[NUM_BYTES]]
        self._target = memories[OUTPUT][target[OFFSET] :][: target[NUM_BYTES]]
        self._num_copied, self._slice_bytes = 0, slice_bytes

    def step(self) -> bool:
        """Copy one slice."""
        piece = slice(self._num_copied, self._num_copied + self._slice_bytes)
        self._target[piece].copy_(self._source[piece])
        self._num_copied += self._slice_bytes
        return True

    @property
    def is_done(self) -> bool:
        """Whether all is copied."""
        return self._num_copied >= len(self._source)

    def stall(self) -> Stall:
        """It never waits."""
        return Stall("copying", (), "", "")


def make_tasks(
    rank_schedule: RankSchedule,
    memories: Sequence[torch.Tensor],
    memory: CpuMemory,
    transport: GlooTransport,
    private: torch.Tensor,
    profile: CallProfile,
) -> list[Task]:
    """All tasks of a rank.

    Args:
        rank_schedule: what the rank does.
        memories: uint8, of the sizes that the rank schedule says, in its order.
        memory: of the node, for its rings.
        transport: to other nodes.
        private: the rank's slots outside shared memory (``CpuLayout.num_private_slots``).
        profile: where bytes are counted.

    """
    depth, slice_bytes = memory.layout.settings.ring_depth, memory.layout.slot_bytes
    staging = Staging(memories, rank_schedule.num_regions)
    tasks: list[Task] = [
        ReceiveAcross(rank_schedule.receives_across, staging, transport, list(private[depth : 2 * depth])),
        SendAcross(rank_schedule.sends_across, staging, transport, list(private[:depth]), profile),
    ]
    for peer, flows in rank_schedule.receives_within.items():
        ring_in = RingIn(memory, memory.ranks.index(peer))
        tasks.append(ReceiveWithin(flows, staging, ring_in, slice_bytes, profile))
    for peer, flows in rank_schedule.sends_within.items():
        ring_out = RingOut(memory, memory.ranks.index(peer))
        tasks.append(SendWithin(flows, staging, ring_out, slice_bytes))
    return [*tasks, CopyOwn(rank_schedule, memories, slice_bytes)]


def _stall(phase: str, message_queue: MessageQueue) -> Stall:
    return Stall(phase, message_queue.peers, f"{message_queue.num_messages} messages", f"{message_queue.num_taken}")
