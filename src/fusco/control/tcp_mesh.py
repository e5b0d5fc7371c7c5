"""TCP connections between ranks, and fixed-size control messages over them.

Messages are progressed by polling in the waiting thread; there is no I/O thread. A message takes the network's time and
a few microseconds. One of gloo takes hundreds of microseconds, as it passes through threads.
"""

from __future__ import annotations

import contextlib
import hmac
import selectors
import socket
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from fusco.control.counters import readable, writable
from fusco.control.store_gather import StoreGather
from fusco.control.threads import in_thread
from fusco.core.errors import Stall

_RANK = struct.Struct("!q")
_SECONDS_BETWEEN_CHECKS = 0.05  # for whether this mesh has been closed
# Unauthenticated connections. Peers authenticate at once, so connections that stay so are not of peers.
_MAX_UNAUTHENTICATED = 256
_BACKLOG = 1024  # all peers may connect at once, and foreign clients before them
_NUM_PROBES = 3
_MAX_KEEPALIVE_S = 32_767  # more is an error of Linux (MAX_TCP_KEEPIDLE)


class TcpConnections:
    """Authenticated connections of one rank to its peers; the relation is symmetric. Sockets never block."""

    name = "TCP mesh"  # of the all-gather of addresses, and in errors

    def __init__(self, store_gather: StoreGather, peers: Sequence[int], listen_on: str, secret: str) -> None:
        """Connect, together with all ranks, to ``peers``: either all ranks have some, or none has.

        Peers reach this rank at ``listen_on``; ``secret``, known to ranks only, authenticates them. Raises ``OSError``
        if the network fails, and as ``StoreGather.wait_until``.
        """
        self.failure = ""  # the first error of the network
        self._is_open = True
        self._connections: dict[int, socket.socket] = {}
        self._credentials = secret.encode() + _RANK.pack(store_gather.rank)
        if peers:
            self._connect(store_gather, peers, listen_on)

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

    def _connect(self, store_gather: StoreGather, peers: Sequence[int], listen_on: str) -> None:
        try:
            with socket.create_server((listen_on, 0), backlog=_BACKLOG) as listener:
                addresses = store_gather.all_gather(self.name, listener.getsockname()[:2])

                def connect() -> None:
                    try:
                        for peer in peers:
                            if peer < store_gather.rank:
                                self._connect_to(peer, tuple(addresses[peer]), store_gather.timeout_s)
                        self._accept_peers(listener, {peer for peer in peers if peer > store_gather.rank})
                    finally:
                        if not self._is_open:  # the wait was given up meanwhile
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

    def _connect_to(self, peer: int, address: tuple[str, int], timeout_s: float) -> None:
        try:
            connection = socket.create_connection(address, timeout=timeout_s)
            self._connections[peer] = connection
            connection.sendall(self._credentials, socket.MSG_NOSIGNAL)
        except OSError as error:
            raise OSError(f"rank {peer} at {address[0]}:{address[1]}: {error}") from error

    def _accept_peers(self, listener: socket.socket, missing: set[int]) -> None:
        """Accept connections until every peer has authenticated or ``close`` is called.

        Unauthenticated clients may stay connected and idle.
        """
        unauthenticated: dict[socket.socket, None] = {}  # the oldest first
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(listener, selectors.EVENT_READ)
                while missing and self._is_open:
                    for connection in [key.fileobj for key, _ in selector.select(_SECONDS_BETWEEN_CHECKS)]:
                        assert isinstance(connection, socket.socket)
                        if connection is listener:
                            if (client := self._accept(listener)) is not None:
                                unauthenticated[client] = None
                                selector.register(client, selectors.EVENT_READ)
                            continue
                        selector.unregister(connection)
                        del unauthenticated[connection]
                        peer = self._authenticate(connection)
                        if peer in missing:
                            missing.remove(peer)
                            self._connections[peer] = connection
                        else:
                            connection.close()
                    while len(unauthenticated) > _MAX_UNAUTHENTICATED:
                        oldest = next(iter(unauthenticated))
                        del unauthenticated[oldest]
                        selector.unregister(oldest)
                        oldest.close()
        finally:
            for connection in unauthenticated:
                connection.close()

    def _accept(self, listener: socket.socket) -> socket.socket | None:
        try:
            connection, _ = listener.accept()
        except ConnectionError:
            return None  # the client has closed it again
        # It becomes readable when its credentials are complete, or when the client has closed it.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, len(self._credentials))
        return connection

    def _authenticate(self, connection: socket.socket) -> int:
        """Return the rank that has connected; -1 without valid credentials."""
        try:
            received = connection.recv(len(self._credentials), socket.MSG_DONTWAIT)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
        except OSError:
            return -1
        secret = self._credentials[: -_RANK.size]
        if len(received) < len(self._credentials) or not hmac.compare_digest(received[: -_RANK.size], secret):
            return -1
        rank: int = _RANK.unpack(received[-_RANK.size :])[0]
        return rank

    def _note_failure(self, direction: str, peer: int, error: str) -> None:
        if not self.failure:
            self.failure = f"the network failed to {direction} (rank {peer}): {error}"


class Mesh(Protocol):
    """Messages in rounds: in each, every rank sends one message to all its peers and receives one from each.

    A rank may be one round ahead of its peers.
    """

    def begin(self, peer_to_message: Mapping[int, bytes], peer_to_memory: Mapping[int, memoryview]) -> None:
        """Begin a round; the previous one must be done.

        Args:
            peer_to_message: bytes for each peer.
            peer_to_memory: memory for each peer's message, or for the part of it that all messages have.
        """

    def poll(self) -> list[int]:
        """Send and receive without blocking; return the peers whose message has become complete."""

    @property
    def is_done(self) -> bool:
        """True once all messages of this round have been sent and received."""


class TcpMesh(TcpConnections):
    """A ``Mesh`` of one connection to each peer."""

    def __init__(self, store_gather: StoreGather, peers: Sequence[int], listen_on: str, secret: str) -> None:
        self._sending: dict[int, memoryview] = {}  # by peer, the bytes not yet sent
        self._receiving: dict[int, memoryview] = {}  # by peer, the memory for the rest of its message
        self._memory_behind: Callable[[int], memoryview] | None = None
        self._have_more = set[int]()  # peers of whose message only the first part has its memory in ``_receiving``
        super().__init__(store_gather, peers, listen_on, secret)

    def begin(
        self,
        peer_to_message: Mapping[int, bytes],
        peer_to_memory: Mapping[int, memoryview],
        memory_behind: Callable[[int], memoryview] | None = None,
    ) -> None:
        """See ``Mesh``.

        Messages may be longer than the memory in ``peer_to_memory``: when that of a peer is full, ``memory_behind``
        returns memory of exactly the size of the rest.
        """
        assert self.is_done, (list(self._sending), list(self._receiving))
        self._sending = {peer: memoryview(message) for peer, message in peer_to_message.items()}
        self._receiving = dict(peer_to_memory)
        self._memory_behind, self._have_more = memory_behind, set(peer_to_memory) if memory_behind else set()
        self._send()

    def resume(self, message: memoryview, peer_to_memory: Mapping[int, memoryview], num_moved: Sequence[int]) -> None:
        """Go on with a round of which something has been done outside.

        ``num_moved``: the bytes sent to each peer, in the order of ``peer_to_memory``, then those received from each.
        """
        num_peers, copy = len(peer_to_memory), memoryview(bytes(message))
        for i, (peer, memory) in enumerate(peer_to_memory.items()):
            if num_moved[i] < len(copy):
                self._sending[peer] = copy[num_moved[i] :]
            if num_moved[num_peers + i] < len(memory):
                self._receiving[peer] = memory[num_moved[num_peers + i] :]

    def poll(self) -> list[int]:
        """See ``Mesh``."""
        self._send()
        return [peer for peer in list(self._receiving) if self._receive(peer)]

    @property
    def is_done(self) -> bool:
        """See ``Mesh``."""
        return not (self._sending or self._receiving)

    def awaited_sockets(self) -> list[int]:
        """Return the sockets that this round waits for, see ``Watchdog.add_sockets``."""
        connections = self._connections
        return [readable(connections[peer].fileno()) for peer in self._receiving] + [
            writable(connections[peer].fileno()) for peer in self._sending
        ]

    def close(self) -> None:
        """Close the connections and drop all references to the caller's memory."""
        self._sending, self._receiving, self._memory_behind = {}, {}, None
        super().close()

    def _send(self) -> None:
        for peer, rest in list(self._sending.items()):
            try:
                num_sent = self._connections[peer].send(rest, socket.MSG_NOSIGNAL)  # raises no SIGPIPE
            except BlockingIOError:
                continue
            except OSError as error:
                self._note_failure("send", peer, str(error))
                continue
            self._sending[peer] = rest[num_sent:]
            if not self._sending[peer]:
                del self._sending[peer]

    def _receive(self, peer: int) -> bool:
        """Receive without blocking; return whether the message is complete."""
        while memory := self._memory_for(peer):
            try:
                num_bytes = self._connections[peer].recv_into(memory)
            except BlockingIOError:
                return False
            except OSError as error:
                self._note_failure("receive", peer, str(error))
                return False
            if not num_bytes:
                self._note_failure("receive", peer, "the connection was closed")
                return False
            self._receiving[peer] = memory[num_bytes:]
        del self._receiving[peer]
        return True

    def _memory_for(self, peer: int) -> memoryview:
        """Return the memory for the rest of a peer's message; empty once the message is complete."""
        if not self._receiving[peer] and peer in self._have_more and self._memory_behind is not None:
            self._have_more.remove(peer)
            self._receiving[peer] = self._memory_behind(peer)
        return self._receiving[peer]


def _keep_alive(connection: socket.socket, timeout_s: float) -> None:
    """Let an idle connection to a machine that is off or unreachable close within about half of the time limit."""
    interval_s = min(max(1, int(timeout_s / 2 / (_NUM_PROBES + 1))), _MAX_KEEPALIVE_S)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, interval_s)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, interval_s)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _NUM_PROBES)
