"""Accepts the connections of peers on all rails; foreign ones are refused."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

from fusco.core.errors import TransportError, reason_of
from fusco.rails.connection import Connection, configure
from fusco.rails.handshake import EndpointInfo, Handshake, Joining
from fusco.rails.host import Host
from fusco.rails.loop import READ

_MAX_JOINING = 256  # connections without a complete handshake; the oldest makes room
_HANDSHAKE_TIMEOUT_S = 5.0
_BACKLOG = 1024
_PAUSE_S = 0.05  # after accepting has failed, for example without descriptors left


class Acceptor:
    """Listeners, one a rail, and connections whose handshake is under way."""

    def __init__(self, host: Host, secret: bytes, join: Callable[[Connection, EndpointInfo], None]) -> None:
        """Listen; ``join`` is called with each connection that a peer has made. Raises ``TransportError``."""
        self._host, self._secret, self._join = host, secret, join
        self._joining: dict[Joining, float] = {}  # with their deadlines, the oldest first
        self._paused_until = 0.0
        self.num_refused = 0  # foreign, replayed or late
        self._listeners: list[socket.socket] = []
        for rail in host.rails:
            family = socket.AF_INET6 if ":" in rail.address else socket.AF_INET
            try:
                listener = socket.create_server((rail.address, 0), family=family, backlog=_BACKLOG)
            except OSError as error:
                self.close()
                where = f"{rail.interface}, {rail.address}"
                raise TransportError(f"cannot listen on {where}: {reason_of(error)}") from error
            listener.settimeout(0)
            self._listeners.append(listener)
        # For each rail, IP address and port.
        self.names = tuple((each.getsockname()[0], each.getsockname()[1]) for each in self._listeners)

    def start(self) -> None:
        """Begin to accept; in the endpoint's thread."""
        for i, listener in enumerate(self._listeners):
            self._host.loop.watch(listener.fileno(), READ, lambda _events, i=i: self._accept(i))  # type: ignore[misc]

    def check(self, now: float) -> None:
        """Refuse connections whose handshake takes too long, and accept again after a pause."""
        for joining in [each for each, deadline in self._joining.items() if deadline < now]:
            self._finish(joining, 0, "late")
        if 0 < self._paused_until <= now:
            self._paused_until = 0.0
            self.start()

    def close(self) -> None:
        """Close everything; listeners are no more watched then."""
        for each in (*self._listeners, *(joining.socket for joining in self._joining)):
            self._host.loop.forget(each.fileno())
            each.close()
        self._listeners.clear()
        self._joining.clear()

    def _accept(self, rail: int) -> None:
        try:
            accepted, _ = self._listeners[rail].accept()
        except ConnectionError:
            return  # the client has closed it again
        except OSError:
            for listener in self._listeners:
                self._host.loop.forget(listener.fileno())
            self._paused_until = time.monotonic() + _PAUSE_S
            return
        configure(accepted, defers=self._host.defers(rail))
        limits = self._host.limits
        this = EndpointInfo(self._host.worker, len(self._host.rails), limits.chunk_bytes)
        handshake = Handshake(self._secret, this, is_server=True)
        try:
            joining = Joining(accepted, handshake, lambda joining, reason: self._finish(joining, rail, reason))
        except OSError:
            accepted.close()  # the client has closed it again
            return
        if len(self._joining) >= _MAX_JOINING:
            self._finish(next(iter(self._joining)), rail, "too many")
        self._joining[joining] = time.monotonic() + _HANDSHAKE_TIMEOUT_S
        self._host.loop.watch(accepted.fileno(), READ, joining.on_event)

    def _finish(self, joining: Joining, rail: int, reason: str) -> None:
        del self._joining[joining]
        self._host.loop.forget(joining.socket.fileno())
        peer = joining.handshake.peer
        if reason or peer is None or not rail == peer.rail < peer.num_rails:
            self.num_refused += 1
            joining.socket.close()
            return
        self._join(Connection(joining.socket, rail, peer.incarnation), peer)
