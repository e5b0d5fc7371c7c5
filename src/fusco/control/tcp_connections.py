"""TCP connections between ranks, authenticated by a secret; foreign clients delay none of them."""

from __future__ import annotations

import contextlib
import hmac
import selectors
import socket
import struct
from collections.abc import Sequence

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

    def __init__(
        self, store_gather: StoreGather, peers: Sequence[int], listen_on: str, secret: str, purpose: str
    ) -> None:
        """Connect, together with all ranks, to ``peers``: either all ranks have some, or none has.

        Peers reach this rank at ``listen_on``; ``secret``, known to ranks only, authenticates them; ``purpose`` names
        the all-gather of addresses. Raises ``OSError`` if the network fails, and as ``StoreGather.wait_until``.
        """
        self.failure = ""  # the first error of the network
        self._is_open = True
        self._connections: dict[int, socket.socket] = {}
        self._credentials = secret.encode() + _RANK.pack(store_gather.rank)
        if peers:
            self._connect(store_gather, peers, listen_on, purpose)

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

    def _connect(self, store_gather: StoreGather, peers: Sequence[int], listen_on: str, purpose: str) -> None:
        try:
            with socket.create_server((listen_on, 0), backlog=_BACKLOG) as listener:
                addresses = store_gather.all_gather(purpose, listener.getsockname()[:2])

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


def _keep_alive(connection: socket.socket, timeout_s: float) -> None:
    """Let an idle connection to a machine that is off or unreachable close within about half of the time limit."""
    interval_s = min(max(1, int(timeout_s / 2 / (_NUM_PROBES + 1))), _MAX_KEEPALIVE_S)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, interval_s)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, interval_s)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _NUM_PROBES)
