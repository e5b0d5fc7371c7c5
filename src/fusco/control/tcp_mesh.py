"""Small messages of one size between ranks, over TCP: whoever waits for them looks after them, with no thread between.

A message takes as long as the network does, and a few microseconds. Gloo's take hundreds, as they pass through its
threads and ours.
"""

from __future__ import annotations

import hmac
import selectors
import socket
import struct
from collections.abc import Callable, Mapping, Sequence

from fusco.control.store_gather import StoreGather
from fusco.control.threads import in_thread
from fusco.core.errors import Stall

_RANK = struct.Struct("!q")
_BETWEEN_LOOKS_S = 0.05  # at whether this rank still wants its peers to connect
# Connections that have not said who they are; peers do so at once, so those that stay are strangers.
_MAX_UNAUTHENTICATED = 256
_BACKLOG = 1024  # peers may all come at once, and strangers before them


class TcpMesh:
    """One rank's connections to some others, each of which has this rank among its own.

    Mail goes round by round: in each, every rank sends one message to all its peers and gets one from each. A rank may
    be a round ahead of its peers.
    """

    def __init__(
        self,
        store_gather: StoreGather,
        peers: Sequence[int],
        listen_on: str,
        secret: str,
        wait_until: Callable[[Callable[[], bool], Callable[[], Stall]], None],
    ) -> None:
        """Connect, together with all ranks.

        Args:
            store_gather: finds them.
            peers: whom this rank exchanges messages with; all ranks have some, or none.
            listen_on: the address by which they reach it.
            secret: what ranks know and strangers do not.
            wait_until: waits for a condition, and raises if a rank does not come.

        Raises ``OSError`` if the network fails, or whatever ``wait_until`` raises.

        """
        self.failure = ""  # what went wrong on the network, if anything did
        self._is_open = True
        self._connections: dict[int, socket.socket] = {}
        self._leaving: dict[int, memoryview] = {}  # by peer, what is not yet sent
        self._coming: dict[int, memoryview] = {}  # by peer, where the rest of its message goes
        self._introduction = secret.encode() + _RANK.pack(store_gather.rank)
        if peers:
            self._connect(store_gather, peers, listen_on, wait_until)

    def begin(self, message: memoryview, places: Mapping[int, memoryview]) -> None:
        """Begin a round, once the one before is done.

        Args:
            message: for all peers, bytes; may change at once.
            places: for each peer, where its message goes; of the same size.

        """
        assert self.is_done, (list(self._leaving), list(self._coming))
        copy = memoryview(bytes(message))
        self._leaving, self._coming = dict.fromkeys(places, copy), dict(places)
        self._send()

    def poll(self) -> list[int]:
        """Move what can be moved without waiting; the peers whose message has come since the last look."""
        self._send()
        return [peer for peer in list(self._coming) if self._receive(peer)]

    @property
    def is_done(self) -> bool:
        """Whether every message of this round has left and come."""
        return not (self._leaving or self._coming)

    def close(self) -> None:
        """Give the connections back, and let go of where messages were to go."""
        self._is_open = False
        self._leaving, self._coming = {}, {}
        while self._connections:
            _, connection = self._connections.popitem()
            connection.close()

    def _connect(
        self,
        store_gather: StoreGather,
        peers: Sequence[int],
        listen_on: str,
        wait_until: Callable[[Callable[[], bool], Callable[[], Stall]], None],
    ) -> None:
        try:
            with socket.create_server((listen_on, 0), backlog=_BACKLOG) as listener:
                addresses = store_gather.all_gather("mail", listener.getsockname()[:2])

                def connect() -> None:
                    try:
                        for peer in peers:
                            if peer < store_gather.rank:
                                self._call(peer, tuple(addresses[peer]), store_gather.timeout_s)
                        self._accept_peers(listener, {peer for peer in peers if peer > store_gather.rank})
                    finally:
                        if not self._is_open:  # nobody waited so long
                            self.close()

                def stall() -> Stall:
                    missing = tuple(peer for peer in peers if peer not in self._connections)
                    return Stall("connecting", missing, f"{len(peers)} connections", f"{len(peers) - len(missing)}")

                connecting = in_thread(connect)
                wait_until(connecting.done, stall)
                connecting.result()
            for connection in self._connections.values():
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connection.settimeout(0)
        except BaseException:
            self.close()
            raise

    def _call(self, peer: int, address: tuple[str, int], timeout_s: float) -> None:
        try:
            connection = socket.create_connection(address, timeout=timeout_s)
            self._connections[peer] = connection
            connection.sendall(self._introduction, socket.MSG_NOSIGNAL)
        except OSError as error:
            raise OSError(f"rank {peer} at {address[0]}:{address[1]}: {error}") from error

    def _accept_peers(self, listener: socket.socket, missing: set[int]) -> None:
        """Let peers connect, until all have or this is closed; strangers may connect, too, and stay without a word."""
        unauthenticated: dict[socket.socket, None] = {}  # the oldest first
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(listener, selectors.EVENT_READ)
                while missing and self._is_open:
                    for connection in [key.fileobj for key, _ in selector.select(_BETWEEN_LOOKS_S)]:
                        assert isinstance(connection, socket.socket)
                        if connection is listener:
                            if (visitor := self._accept(listener)) is not None:
                                unauthenticated[visitor] = None
                                selector.register(visitor, selectors.EVENT_READ)
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
            return None  # it has gone again
        # It is ready to be read once it has said all, or has gone.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, len(self._introduction))
        return connection

    def _authenticate(self, connection: socket.socket) -> int:
        """Who has connected; negative for a stranger."""
        try:
            said = connection.recv(len(self._introduction), socket.MSG_DONTWAIT)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
        except OSError:
            return -1
        secret = self._introduction[: -_RANK.size]
        if len(said) < len(self._introduction) or not hmac.compare_digest(said[: -_RANK.size], secret):
            return -1
        rank: int = _RANK.unpack(said[-_RANK.size :])[0]
        return rank

    def _send(self) -> None:
        for peer, rest in list(self._leaving.items()):
            try:
                num_sent = self._connections[peer].send(rest, socket.MSG_NOSIGNAL)  # fails, whatever SIGPIPE does here
            except BlockingIOError:
                continue
            except OSError as error:
                self._note_failure("send", peer, str(error))
                continue
            self._leaving[peer] = rest[num_sent:]
            if not self._leaving[peer]:
                del self._leaving[peer]

    def _receive(self, peer: int) -> bool:
        """Whether the message is whole now."""
        while place := self._coming[peer]:
            try:
                num_bytes = self._connections[peer].recv_into(place)
            except BlockingIOError:
                return False
            except OSError as error:
                self._note_failure("receive", peer, str(error))
                return False
            if not num_bytes:
                self._note_failure("receive", peer, "the connection was closed")
                return False
            self._coming[peer] = place[num_bytes:]
        del self._coming[peer]
        return True

    def _note_failure(self, direction: str, peer: int, error: str) -> None:
        if not self.failure:
            self.failure = f"the network failed to {direction} (rank {peer}): {error}"
