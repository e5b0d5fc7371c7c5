"""Point-to-point messages of any size between nodes over TCP, progressed by polling in the calling thread.

The kernel moves the bytes of its socket buffers while this thread copies rows.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from fusco.control.counters import readable, writable
from fusco.control.hello import NOTHING, ClientHello, HelloListener, SocketLoop, listen_on
from fusco.control.member_gather import Gather
from fusco.control.transport import Message, Ticket, memory_of
from fusco.core.errors import Stall
from fusco.core.threads import in_thread

_RANK = struct.Struct("!q")
_SECONDS_BETWEEN_CHECKS = 0.05  # for whether this mesh has been closed
_NUM_PROBES = 3
_MAX_KEEPALIVE_S = 32_767  # more is an error of Linux (MAX_TCP_KEEPIDLE)


class TcpConnections:
    """Authenticated connections of one rank to its peers; the relation is symmetric. Sockets never block."""

    def __init__(self, store_gather: Gather, peers: Sequence[int], host: str, secret: str, purpose: str) -> None:
        """Connect, together with all ranks, to ``peers``: either all ranks have some, or none has.

        Peers reach this rank at ``host``; ``secret``, known to ranks only, authenticates them; ``purpose`` names
        the all-gather of addresses. Raises ``OSError`` if the network fails, and as ``StoreGather.wait_until``.
        """
        self.failure = ""  # the first error of the network
        self._is_open = True
        self._connections: dict[int, socket.socket] = {}
        self._secret, self._rank, self._numbers = secret.encode(), store_gather.rank, store_gather.members
        if peers:
            self._connect(store_gather, peers, host, purpose)

    @property
    def descriptors(self) -> dict[int, int]:
        """File descriptor of the connection to each peer."""
        return {peer: connection.fileno() for peer, connection in self._connections.items()}

    def close(self) -> None:
        """Close the connections."""
        self._is_open = False
        with contextlib.suppress(KeyError):  # the thread that connects may close them, too
            while self._connections:
                _, connection = self._connections.popitem()
                connection.close()

    def _connect(self, store_gather: Gather, peers: Sequence[int], host: str, purpose: str) -> None:
        try:
            with listen_on(host) as listener:
                addresses = store_gather.all_gather(purpose, listener.getsockname()[:2])

                def connect() -> None:
                    try:
                        lower = {peer: tuple(addresses[peer]) for peer in peers if peer < self._rank}
                        self._meet(listener, lower, set(peers) - set(lower))
                    finally:
                        if not self._is_open:  # the wait has been given up
                            self.close()

                def stall() -> Stall:
                    missing = tuple(peer for peer in peers if peer not in self._connections)
                    return Stall("connecting", missing, f"{len(peers)} connections", f"{len(peers) - len(missing)}")

                connecting = in_thread(connect, "connecting to other nodes")
                store_gather.wait_until(connecting.done, stall)
                connecting.result()
            for connection in self._connections.values():
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                _keep_alive(connection, store_gather.timeout_s)
                connection.settimeout(0)
        except BaseException:
            self.close()
            raise

    def _meet(self, listener: socket.socket, lower: dict[int, tuple[str, int]], higher: set[int]) -> None:
        """Connect to lower ranks and accept connections of higher ones until all are there or ``close`` is called."""

        def answer(request: bytes) -> bytes | None:
            return b"" if rank_in(request) in higher - self._connections.keys() else None

        def keep(request: bytes, connection: socket.socket) -> None:
            self._connections[rank_in(request)] = connection

        def rank_in(request: bytes) -> int:
            return int(_RANK.unpack(request)[0]) if len(request) == _RANK.size else -1

        with SocketLoop() as loop:
            HelloListener(loop, listener, self._secret, answer, keep)
            for peer, address in lower.items():
                with _naming(self._numbers[peer], address):
                    hello = ClientHello(address, self._secret, _RANK.pack(self._rank))
                loop.add(hello.connection, partial(self._advance, hello, peer, address))
            while len(self._connections) < len(lower) + len(higher) and self._is_open:
                loop.turn(_SECONDS_BETWEEN_CHECKS)

    def _advance(self, hello: ClientHello, peer: int, address: tuple[str, int]) -> int:
        with _naming(self._numbers[peer], address):
            if isinstance(advanced := hello.advance(), int):
                return advanced
        self._connections[peer] = hello.connection
        return NOTHING

    def _note_failure(self, direction: str, peer: int, error: str) -> None:
        if not self.failure:
            self.failure = f"the network failed to {direction} (rank {self._numbers[peer]}): {error}"


@contextlib.contextmanager
def _naming(peer: int, address: tuple[str, int]) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OSError(f"rank {peer} at {address[0]}:{address[1]}: {error}") from error


def _keep_alive(connection: socket.socket, timeout_s: float) -> None:
    """Let an idle connection to a machine that is off or unreachable close within about half of the time limit."""
    interval_s = min(max(1, int(timeout_s / 2 / (_NUM_PROBES + 1))), _MAX_KEEPALIVE_S)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, interval_s)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, interval_s)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _NUM_PROBES)


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
            if not queue[0].advance(num_bytes):
                break  # the kernel took as much as it has room for
            queue.popleft()
            self._num_sending -= 1
        return has_moved

    def _pull(self, peer: int) -> bool:
        queue, num_bytes = self._receiving[peer], 0
        if not queue:
            return False
        try:
            num_bytes = self._connections[peer].recv_into(queue[0].rest)
        except BlockingIOError:
            return False
        except OSError as error:
            self._note_failure("receive", peer, str(error))
            return False
        if not num_bytes:
            self._note_failure("receive", peer, "the connection was closed")
        elif queue[0].advance(num_bytes):
            queue.popleft()
            self._num_receiving -= 1
        return num_bytes > 0
