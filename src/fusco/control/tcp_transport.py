"""Point-to-point messages of any size between nodes over TCP, progressed by polling in the calling thread.

The kernel moves the bytes of its socket buffers while this thread copies rows.
"""

from __future__ import annotations

import select
import socket
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fusco.control.counters import readable, writable
from fusco.control.member_gather import Gather
from fusco.control.tcp_connections import TcpConnections
from fusco.control.transport import Message, Ticket, memory_of

# Bytes of a connection that the kernel takes before it can send them. What it has taken it sends at once: with whole
# buffers of megabytes, connections would share a NIC as TCP's windows happen to be, and not in the order of sending.
_MAX_UNSENT_BYTES = 128 << 10


@dataclass(slots=True)
class _UnderWay:
    """Memory that is still to be sent, or filled."""

    rest: memoryview
    ticket: Ticket
    on_done: Callable[[], None] | None = None

    def advance(self, num_bytes: int) -> bool:
        """Count bytes that were moved; return whether the message is complete."""
        self.rest = self.rest[num_bytes:]
        if self.rest:
            return False
        if self.on_done:
            self.on_done()
        self.ticket.is_done = True
        return True


class TcpTransport(TcpConnections):
    """A ``Transport`` of one connection to each peer; without peers nothing is opened."""

    def __init__(
        self, store_gather: Gather, peers: Sequence[int], listen_on: str, secret: str, purpose: str = "TCP"
    ) -> None:
        self._sending: dict[int, deque[_UnderWay]] = {peer: deque() for peer in peers}
        self._receiving: dict[int, deque[_UnderWay]] = {peer: deque() for peer in peers}
        self._num_sending = self._num_receiving = 0  # messages in these queues
        self._epoll: select.epoll | None = None
        super().__init__(store_gather, peers, listen_on, secret, purpose)
        if peers:
            self._epoll = select.epoll()
        self._peer_to_fd = self.descriptors
        self._fd_to_peer = {fd: peer for peer, fd in self._peer_to_fd.items()}
        for fd in self._fd_to_peer:
            assert self._epoll
            self._epoll.register(fd, select.EPOLLIN)
        for connection in self._connections.values():
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _MAX_UNSENT_BYTES)

    def send(self, message: Message, dst: int) -> Ticket:
        """See ``Transport``."""
        ticket, queue = Ticket(), self._sending[dst]
        queue.append(_UnderWay(memory_of(message), ticket))
        self._num_sending += 1
        if len(queue) == 1:
            self._push(dst)
        return ticket

    def receive(self, message: Message, src: int, on_done: Callable[[], None] | None = None) -> Ticket:
        """See ``Transport``."""
        ticket = Ticket()
        self._receiving[src].append(_UnderWay(memory_of(message), ticket, on_done))
        self._num_receiving += 1
        return ticket

    def poll(self) -> bool:
        """Take at most one message from each rank; else as ``Transport.poll``."""
        has_moved = False
        if self._num_sending:
            for peer, queue in self._sending.items():
                has_moved |= bool(queue) and self._push(peer)
        if self._num_receiving:
            assert self._epoll
            for fd, _ in self._epoll.poll(0):
                has_moved |= self._pull(self._fd_to_peer[fd])
        return has_moved

    def awaited_sockets(self) -> list[int]:
        """Return the sockets that messages wait for, see ``Network``."""
        if not (self._num_receiving or self._num_sending):
            return []
        sockets = [readable(self._peer_to_fd[peer]) for peer, queue in self._receiving.items() if queue]
        return sockets + [writable(self._peer_to_fd[peer]) for peer, queue in self._sending.items() if queue]

    @property
    def unflushed_peers(self) -> tuple[int, ...]:
        """None: what a ticket says to be done has left this process."""
        return ()

    def close(self) -> None:
        """See ``Transport``; memory of messages is referenced no more."""
        self._sending, self._receiving = {}, {}
        self._num_sending = self._num_receiving = 0
        if self._epoll:
            self._epoll.close()
        super().close()

    def _push(self, peer: int) -> bool:
        queue, connection, has_moved = self._sending[peer], self._connections[peer], False
        while queue:
            try:
                num_bytes = connection.send(queue[0].rest, socket.MSG_NOSIGNAL)
            except BlockingIOError:
                break
            except OSError as error:
                self._note_failure("send", peer, str(error))
                break
            has_moved = True
            if queue[0].advance(num_bytes):
                queue.popleft()
                self._num_sending -= 1
        return has_moved

    def _pull(self, peer: int) -> bool:
        queue, connection, has_moved = self._receiving[peer], self._connections[peer], False
        while queue:
            try:
                num_bytes = connection.recv_into(queue[0].rest)
            except BlockingIOError:
                break
            except OSError as error:
                self._note_failure("receive", peer, str(error))
                break
            if not num_bytes:
                self._note_failure("receive", peer, "the connection was closed")
                break
            has_moved = True
            if queue[0].advance(num_bytes):
                queue.popleft()
                self._num_receiving -= 1
                break
        return has_moved
