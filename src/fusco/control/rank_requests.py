"""Requests between ranks, one a connection: a thread that answers them, and a function that asks many at once."""

from __future__ import annotations

import contextlib
import errno
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from fusco.control.hello import NOTHING, WRITE, ClientHello, HelloListener, SocketLoop, listen_on

_CLIENT_TIMEOUT_S = 5.0  # ranks send their request at once
_SECONDS_BETWEEN_CHECKS = 0.5  # for clients that have timed out
_JOIN_TIMEOUT_S = 1.0  # more than the thread needs, which ends at once
_PAUSE_AFTER_FAILED_ACCEPT_S = 0.05
_MAX_CONNECTIONS = 256  # at a time
# Errors that keep this process from asking, and say nothing about the process that it asks.
_LOCAL_FAILURES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EADDRNOTAVAIL)


class RequestServer:
    """One thread that answers a request of each connection and closes it; see ``HelloListener`` for its bounds."""

    def __init__(
        self,
        host: str,
        secret: bytes,
        answer: Callable[[bytes], bytes | None],
        on_answered: Callable[[bytes], None] = lambda _: None,
    ) -> None:
        """Listen; the thread calls ``answer`` with a request, and ``on_answered`` once the answer is sent.

        Both must return soon and must not raise. Raises ``OSError``.
        """
        self._is_closed, self._on_answered = False, on_answered
        with contextlib.ExitStack() as undo:
            self._socket, self._loop = undo.enter_context(listen_on(host)), SocketLoop()
            self.port: int = self._socket.getsockname()[1]
            self._listener = HelloListener(
                self._loop, self._socket, secret, answer, self._end_request, challenges=False
            )
            self._thread = threading.Thread(target=self._run, name="fusco-status-server", daemon=True)
            self._thread.start()
            undo.pop_all()

    def close(self) -> None:
        """Stop listening and close all connections; any thread may call it."""
        if self._is_closed:
            return
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
        if threading.current_thread() is not self._thread:
            self._thread.join(_JOIN_TIMEOUT_S)
        self._socket.close()

    def _end_request(self, request: bytes, connection: socket.socket) -> None:
        connection.close()
        self._on_answered(request)

    def _run(self) -> None:
        with self._loop:
            while not self._is_closed:
                try:
                    self._loop.turn(_SECONDS_BETWEEN_CHECKS if self._listener.has_clients else None)
                except OSError:
                    if not self._is_closed:  # no descriptor is left
                        time.sleep(_PAUSE_AFTER_FAILED_ACCEPT_S)
                self._listener.close_late_clients(_CLIENT_TIMEOUT_S)


def is_local_failure(error: Exception) -> bool:
    """Return whether a connection failed because this process has no descriptor, memory or port left."""
    return isinstance(error, OSError) and error.errno in _LOCAL_FAILURES


class Requests(contextlib.AbstractContextManager["Requests"]):
    """Requests under way to servers, in the calling thread: the process may have none left to start.

    ``close``, or the end of a ``with``, gives up those that have no answer.
    """

    def __init__(self, secret: bytes) -> None:
        self._secret, self._loop = secret, SocketLoop()
        self._waiting: deque[tuple[tuple[str, int], bytes, Callable[[bytes | OSError], None]]] = deque()

    def __len__(self) -> int:
        return len(self._waiting) + len(self._loop)

    def __exit__(self, *_: object) -> None:
        self.close()

    def add(self, address: tuple[str, int], request: bytes, note: Callable[[bytes | OSError], None]) -> None:
        """Send a request to an IPv4 address; ``turn`` calls ``note`` with the answer, or the error instead of it."""
        self._waiting.append((address, request, note))

    def turn(self, timeout_s: float) -> bool:
        """Do what is possible, waiting for it at most ``timeout_s``; return False if nothing was."""
        while self._waiting and len(self._loop) < _MAX_CONNECTIONS:
            address, request, note = self._waiting[0]
            try:
                hello = ClientHello(address, self._secret, request, awaits_challenge=False)
            except OSError as error:
                if is_local_failure(error) and len(self._loop):
                    break  # until a connection under way has closed
                note(error)
            else:
                self._loop.add(hello.connection, partial(_advance, hello, note), WRITE)
            self._waiting.popleft()
        return not len(self._loop) or self._loop.turn(timeout_s)

    def close(self) -> None:
        """Give up all requests."""
        self._waiting.clear()
        self._loop.close()


def ask_all(
    addresses: Sequence[tuple[str, int]], secret: bytes, request: bytes, timeout_s: float
) -> list[bytes | OSError]:
    """Send a request to all IPv4 addresses; return each one's answer, or the error that prevented it.

    ``timeout_s`` is the limit for all of them together: a ``TimeoutError`` for each that has not answered by then.
    """
    outcomes: list[bytes | OSError] = [TimeoutError(f"no answer within {timeout_s:.1f} s") for _ in addresses]
    deadline = time.monotonic() + timeout_s
    with Requests(secret) as requests:
        for index, address in enumerate(addresses):
            requests.add(address, request, partial(outcomes.__setitem__, index))
        while len(requests) and requests.turn(max(0.0, deadline - time.monotonic())):
            pass
    return outcomes


def _advance(hello: ClientHello, note: Callable[[bytes | OSError], None]) -> int:
    """Do what is possible now; note the outcome and close the connection once there is one."""
    outcome: bytes | OSError
    try:
        advanced = hello.advance()
        if isinstance(advanced, int):
            return advanced
        outcome = advanced
    except OSError as error:
        outcome = error
    note(outcome)
    hello.connection.close()
    return NOTHING
