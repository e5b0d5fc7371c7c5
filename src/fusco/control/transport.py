"""Messages between nodes: the interface of their transports, and rounds of messages over one of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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


class Network(Protocol):
    """What a watchdog asks of a network; a ``Transport`` is one."""

    @property
    def failure(self) -> str:
        """The first error of the network; empty while it works."""

    def poll(self) -> bool:
        """Progress messages without blocking; return whether any bytes moved."""

    def awaited_sockets(self) -> list[int] | None:
        """Return the sockets that messages wait for, by ``readable`` and ``writable``.

        ``None`` if they are unknown, so that every wait must poll.
        """


class Transport(Network, Protocol):
    """Messages between this rank and ranks of other nodes, progressed by polling in the calling thread.

    There is no I/O thread: a message takes the network's time and a few microseconds, where one of gloo takes hundreds,
    as it passes through threads. Messages from one rank to another arrive in the order of sending, and must be received
    in that order.
    """

    def send(self, message: Message, dst: int) -> Ticket:
        """Start to send a message, which must not change until the ticket is done."""

    def receive(self, message: Message, src: int, on_done: Callable[[], None] | None = None) -> Ticket:
        """Start to receive into memory of exactly the size that ``src`` sends.

        ``on_done`` is called as soon as the message has arrived.
        """

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
        peer_to_moved: Mapping[int, tuple[int, int]] | None = None,
    ) -> None:
        """Begin a round, or go on with one of which something has been done outside; the previous one must be done.

        Args:
            peer_to_message: bytes for each peer.
            peer_to_memory: memory for each peer's message, or for the part of it that all messages have.
            memory_behind: returns the memory for the rest of a peer's message, of exactly its size, once the first part
                is here; ``None`` if there is none.
            peer_to_moved: the bytes that have been sent to each peer, and received from it.
        """
        assert self.is_done, self._tickets
        self._memory_behind, moved = memory_behind, peer_to_moved or {}
        rests = [(peer, memoryview(each)[moved.get(peer, (0, 0))[0] :]) for peer, each in peer_to_message.items()]
        self._tickets = [self.transport.send(rest, peer) for peer, rest in rests if rest]
        for peer, memory in peer_to_memory.items():
            self._receive(peer, memory, moved.get(peer, (0, 0))[1])

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

    def _receive(self, peer: int, memory: memoryview, num_received: int) -> None:
        if num_received < len(memory):
            ticket = self.transport.receive(
                memory[num_received:], peer, partial(self._receive, peer, memory, len(memory))
            )
        elif self._memory_behind and (rest := self._memory_behind(peer)[num_received - len(memory) :]):
            ticket = self.transport.receive(rest, peer, partial(self._note_arrival, peer))
        else:
            self._note_arrival(peer)
            return
        self._tickets.append(ticket)

    def _note_arrival(self, peer: int) -> None:
        self._arrived.append(peer)
