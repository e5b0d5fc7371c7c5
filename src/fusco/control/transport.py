"""Messages between nodes: the interface of their transports, and rounds of messages over one of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

import torch

from fusco.core.rows import as_bytes

Message = torch.Tensor | memoryview  # a contiguous CPU tensor, or bytes; not empty


def memory_of(message: Message) -> memoryview:
    """Return the bytes of a message."""
    return message if isinstance(message, memoryview) else as_bytes(message).numpy().data


class Ticket:
    """Message in flight. One that fails is never done; ``Transport.failure`` has the reason."""

    __slots__ = ("is_done",)

    def __init__(self) -> None:
        self.is_done = False


class Transport(Protocol):
    """Messages between this rank and ranks of other nodes, progressed by polling in the calling thread.

    There is no I/O thread: a message takes the network's time and a few microseconds, where one of gloo takes hundreds,
    as it passes through threads. Messages from one rank to another arrive in the order of sending, and must be received
    in that order.
    """

    @property
    def failure(self) -> str:
        """The first error of the network; empty while it works."""

    def send(self, message: Message, dst: int) -> Ticket:
        """Start to send a message, which must not change until the ticket is done."""

    def receive(self, message: Message, src: int, on_done: Callable[[], None] | None = None) -> Ticket:
        """Start to receive into memory of exactly the size that ``src`` sends.

        ``on_done`` is called as soon as the message has arrived.
        """

    def poll(self) -> bool:
        """Send and receive without blocking; return whether any bytes moved."""

    def awaited_sockets(self) -> list[int] | None:
        """Return the sockets that messages wait for, see ``Network``."""

    @property
    def unflushed_peers(self) -> tuple[int, ...]:
        """Peers that wait for something that this rank has not sent yet, although all its messages are done."""

    def close(self) -> None:
        """Close the connections; messages in flight are dropped."""


class Mesh:
    """Messages in rounds over a transport: in each, every rank sends one to all its peers and receives one from each.

    A rank may be one round ahead of its peers.
    """

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self._tickets: list[Ticket] = []
        self._arrived: list[int] = []
        self._memory_behind: Callable[[int], memoryview] | None = None

    def begin(
        self,
        peer_to_message: Mapping[int, bytes],
        peer_to_memory: Mapping[int, memoryview],
        memory_behind: Callable[[int], memoryview] | None = None,
    ) -> None:
        """Begin a round; the previous one must be done.

        Args:
            peer_to_message: bytes for each peer.
            peer_to_memory: memory for each peer's message, or for the part of it that all messages have.
            memory_behind: returns the memory for the rest of a peer's message, of exactly its size, once the first part
                is here; ``None`` if there is none.
        """
        assert self.is_done, self._tickets
        self._memory_behind = memory_behind
        self._tickets = [self.transport.send(memoryview(each), peer) for peer, each in peer_to_message.items()]
        self._tickets += [self._receive(peer, memory) for peer, memory in peer_to_memory.items()]

    def resume(self, message: memoryview, peer_to_memory: Mapping[int, memoryview], num_moved: Sequence[int]) -> None:
        """Go on with a round of which something has been done outside.

        ``num_moved``: the bytes sent to each peer, in the order of ``peer_to_memory``, then those received from each.
        """
        assert self.is_done, self._tickets
        copy, self._memory_behind, self._tickets = memoryview(bytes(message)), None, []
        moved = zip(num_moved, num_moved[len(peer_to_memory) :], strict=False)
        for (peer, memory), (num_sent, num_received) in zip(peer_to_memory.items(), moved, strict=True):
            if num_sent < len(copy):
                self._tickets.append(self.transport.send(copy[num_sent:], peer))
            if num_received < len(memory):
                self._tickets.append(self._receive(peer, memory[num_received:]))

    def poll(self) -> list[int]:
        """Send and receive without blocking; return the peers whose message has become complete."""
        if self.transport.poll() and self._memory_behind:
            self.transport.poll()  # a rest is right behind the first part
        arrived, self._arrived = self._arrived, []
        return arrived

    @property
    def is_done(self) -> bool:
        """True once all messages of this round have been sent and received."""
        return all(ticket.is_done for ticket in self._tickets) and not self.transport.unflushed_peers

    def _receive(self, peer: int, memory: memoryview) -> Ticket:
        return self.transport.receive(memory, peer, partial(self._has_come, peer))

    def _has_come(self, peer: int) -> None:
        if self._memory_behind and (rest := self._memory_behind(peer)):
            self._tickets.append(self.transport.receive(rest, peer, partial(self._note_arrival, peer)))
        else:
            self._note_arrival(peer)

    def _note_arrival(self, peer: int) -> None:
        self._arrived.append(peer)
