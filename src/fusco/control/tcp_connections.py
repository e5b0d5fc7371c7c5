"""TCP connections between ranks, authenticated by a secret; foreign clients delay none of them."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Iterator, Sequence
from functools import partial

from fusco.control.hello import ClientHello
from fusco.control.hello_listener import HelloListener, listen_on
from fusco.control.member_gather import Gather
from fusco.control.socket_loop import NOTHING, SocketLoop
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
