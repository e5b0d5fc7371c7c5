"""A listening socket of a loop: clients that prove that they know a secret get an answer, all others nothing."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from functools import partial

from fusco.control.hello import ServerHello
from fusco.control.socket_loop import NOTHING, READ, SocketLoop

# Ranks authenticate at once. Connections that stay unauthenticated are not of ranks.
_MAX_CLIENTS = 256
_BACKLOG = 1024  # all ranks may connect at once, and foreign clients before them


def listen_on(host: str) -> socket.socket:
    """Listen on a free port; raises ``OSError``."""
    return socket.create_server((host, 0), backlog=_BACKLOG)


class HelloListener:
    """Accepts connections and answers one request of each.

    The number of clients is bounded: a new one replaces the oldest. So are the bytes of a request.
    """

    def __init__(
        self,
        loop: SocketLoop,
        listener: socket.socket,
        secret: bytes,
        answer: Callable[[bytes], bytes | None],
        on_answered: Callable[[bytes, socket.socket], None],
        *,
        challenges: bool = True,
    ) -> None:
        """Add the listener to a loop, whose thread calls ``answer`` with a request, then ``on_answered``.

        Both must return soon and must not raise. ``None`` closes the connection without an answer; ``on_answered`` gets
        the connection. A turn of the loop raises ``OSError`` if no connection can be accepted, for example because no
        descriptor is left.
        """
        self._loop, self._listener, self._secret = loop, listener, secret
        self._answer, self._on_answered, self._challenges = answer, on_answered, challenges
        self._clients: dict[socket.socket, float] = {}  # and when they came; the oldest first
        loop.add(listener, self._accept)

    @property
    def has_clients(self) -> bool:
        """True while clients have not authenticated."""
        return bool(self._clients)

    def close_late_clients(self, timeout_s: float) -> None:
        """Close connections whose request has not come within ``timeout_s``."""
        latest = time.monotonic() - timeout_s
        for connection in [connection for connection, came in self._clients.items() if came < latest]:
            self._drop(connection)

    def _accept(self) -> int:
        try:
            connection, _ = self._listener.accept()
        except (ConnectionError, BlockingIOError):
            return READ  # the client has closed it again
        connection.settimeout(0)
        try:
            hello = ServerHello(connection, self._secret, challenges=self._challenges)
        except OSError:
            connection.close()
            return READ
        if len(self._clients) >= _MAX_CLIENTS:
            self._drop(next(iter(self._clients)))
        self._clients[connection] = time.monotonic()
        self._loop.add(connection, partial(self._advance, hello))
        return READ

    def _advance(self, hello: ServerHello) -> int:
        connection = hello.connection
        try:
            request = hello.request()
            if request is None:
                return READ
            answer = self._answer(request)
            if answer is None:
                raise ConnectionRefusedError
            hello.answer(answer)
        except OSError:  # foreign, or the client has closed the connection, so there is none to answer
            del self._clients[connection]
            connection.close()
            return NOTHING
        del self._clients[connection]
        self._on_answered(request, connection)
        return NOTHING

    def _drop(self, connection: socket.socket) -> None:
        del self._clients[connection]
        self._loop.forget(connection)
        connection.close()
