"""A thread that answers single lines over TCP, with bounds on connections, bytes and time."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

MAX_LINE_BYTES = 1 << 16
# Ranks send their line at once and close after the answer. Connections that stay are not of ranks.
_MAX_CLIENTS = 256
_CLIENT_TIMEOUT_S = 5.0
_SECONDS_BETWEEN_CHECKS = 0.5  # for clients that have timed out
_BACKLOG = 1024  # all ranks may ask at once
_JOIN_TIMEOUT_S = 1.0  # more than the thread needs, which ends at once
_PAUSE_AFTER_FAILED_ACCEPT_S = 0.05


@dataclass
class _Client:
    connection: socket.socket
    deadline: float
    received: bytearray = field(default_factory=bytearray)


class LineServer:
    """Reads one line from each connection, sends the answer, if there is one, and closes the connection.

    One thread serves all connections. Their number is bounded: a new one replaces the oldest. Both the bytes of a line
    and the time until it is complete are bounded.
    """

    def __init__(self, host: str, answer: Callable[[bytes], bytes | None]) -> None:
        """Listen; ``answer`` is called in the thread, must return soon, and must not raise. Raises ``OSError``."""
        self._answer, self._is_closed = answer, False
        self._clients: dict[int, _Client] = {}  # by descriptor, the oldest first
        with contextlib.ExitStack() as undo:
            self._listener = undo.enter_context(socket.create_server((host, 0), backlog=_BACKLOG))
            self._listener.settimeout(0)
            self.port: int = self._listener.getsockname()[1]
            self._poll = selectors.PollSelector()  # needs no descriptor
            self._poll.register(self._listener, selectors.EVENT_READ)
            self._thread = threading.Thread(target=self._run, name="fusco-status-server", daemon=True)
            self._thread.start()
            undo.pop_all()

    def close(self) -> None:
        """Stop listening and close all connections; any thread may call it."""
        if self._is_closed:
            return
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        if threading.current_thread() is not self._thread:
            self._thread.join(_JOIN_TIMEOUT_S)
        self._listener.close()

    def _run(self) -> None:
        try:
            while not self._is_closed:
                for key, _ in self._poll.select(_SECONDS_BETWEEN_CHECKS if self._clients else None):
                    if key.fileobj is self._listener:
                        self._accept()
                    elif client := self._clients.get(key.fd):
                        self._receive(client)
                self._close_late_clients()
        finally:
            for client in list(self._clients.values()):
                self._close(client)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            if not self._is_closed:  # the client has closed again, or no descriptor is left
                time.sleep(_PAUSE_AFTER_FAILED_ACCEPT_S)
            return
        connection.settimeout(0)
        if len(self._clients) >= _MAX_CLIENTS:
            self._close(next(iter(self._clients.values())))
        self._clients[connection.fileno()] = _Client(connection, time.monotonic() + _CLIENT_TIMEOUT_S)
        self._poll.register(connection, selectors.EVENT_READ)

    def _receive(self, client: _Client) -> None:
        try:
            piece = client.connection.recv(MAX_LINE_BYTES)
            client.received += piece
            line, end, _ = client.received.partition(b"\n")
            if piece and not end and len(client.received) < MAX_LINE_BYTES:
                return
            if end and (answer := self._answer(bytes(line))) is not None:
                client.connection.send(answer + b"\n", socket.MSG_NOSIGNAL)  # any socket's buffer holds a line
        except BlockingIOError:
            return
        except OSError:
            pass  # the client has closed the connection, so there is none to answer
        self._close(client)

    def _close_late_clients(self) -> None:
        now = time.monotonic()
        for client in [client for client in self._clients.values() if client.deadline < now]:
            self._close(client)

    def _close(self, client: _Client) -> None:
        del self._clients[client.connection.fileno()]
        self._poll.unregister(client.connection)
        client.connection.close()
