"""A thread that answers lines over TCP, and holds no more connections, bytes and time than it has bounds for."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

MAX_LINE_BYTES = 1 << 16
# Ranks say their line at once and leave with the answer, so those that stay are strangers.
_MAX_VISITORS = 256
_SECONDS_TO_SPEAK = 5.0
_BETWEEN_LOOKS_S = 0.5  # at who has stayed for too long
_BACKLOG = 1024  # all ranks may ask at once
_ENDING_S = 1.0  # more than the thread takes to end, which it does at once
_PAUSE_WITHOUT_ROOM_S = 0.05


@dataclass
class _Visitor:
    connection: socket.socket
    until: float
    said: bytearray = field(default_factory=bytearray)


class Answerer:
    """Reads one line from each connection and sends the answer, if there is one; then it hangs up.

    One thread for all connections, of which it holds a bounded number: a new one takes the place of the oldest. A line
    has a bounded number of bytes, and a bounded time to come.
    """

    def __init__(self, host: str, answer: Callable[[bytes], bytes | None]) -> None:
        """Listen; ``answer`` is called in the thread, must return soon, and must not raise. Raises ``OSError``."""
        self._answer, self._is_closed = answer, False
        self._visitors: dict[int, _Visitor] = {}  # by descriptor, the oldest first
        with contextlib.ExitStack() as undo:
            self._listener = undo.enter_context(socket.create_server((host, 0), backlog=_BACKLOG))
            self._listener.settimeout(0)
            self.port: int = self._listener.getsockname()[1]
            self._poll = selectors.PollSelector()  # takes no descriptor
            self._poll.register(self._listener, selectors.EVENT_READ)
            self._thread = threading.Thread(target=self._run, name="fusco-sentinel", daemon=True)
            self._thread.start()
            undo.pop_all()

    def close(self) -> None:
        """Stop listening and hang up; may be called from any thread."""
        if self._is_closed:
            return
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        if threading.current_thread() is not self._thread:
            self._thread.join(_ENDING_S)
        self._listener.close()

    def _run(self) -> None:
        try:
            while not self._is_closed:
                for key, _ in self._poll.select(_BETWEEN_LOOKS_S if self._visitors else None):
                    if key.fileobj is self._listener:
                        self._let_in()
                    elif visitor := self._visitors.get(key.fd):
                        self._hear(visitor)
                self._send_away_those_who_stay()
        finally:
            for visitor in list(self._visitors.values()):
                self._hang_up(visitor)

    def _let_in(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            if not self._is_closed:  # gone again, or no descriptor is left
                time.sleep(_PAUSE_WITHOUT_ROOM_S)
            return
        connection.settimeout(0)
        if len(self._visitors) >= _MAX_VISITORS:
            self._hang_up(next(iter(self._visitors.values())))
        self._visitors[connection.fileno()] = _Visitor(connection, time.monotonic() + _SECONDS_TO_SPEAK)
        self._poll.register(connection, selectors.EVENT_READ)

    def _hear(self, visitor: _Visitor) -> None:
        try:
            piece = visitor.connection.recv(MAX_LINE_BYTES)
            visitor.said += piece
            line, end, _ = visitor.said.partition(b"\n")
            if piece and not end and len(visitor.said) < MAX_LINE_BYTES:
                return
            if end and (answer := self._answer(bytes(line))) is not None:
                visitor.connection.send(answer + b"\n", socket.MSG_NOSIGNAL)  # a line fits into any socket
        except BlockingIOError:
            return
        except OSError:
            pass  # the visitor has gone, and is owed no answer
        self._hang_up(visitor)

    def _send_away_those_who_stay(self) -> None:
        now = time.monotonic()
        for visitor in [visitor for visitor in self._visitors.values() if visitor.until < now]:
            self._hang_up(visitor)

    def _hang_up(self, visitor: _Visitor) -> None:
        del self._visitors[visitor.connection.fileno()]
        self._poll.unregister(visitor.connection)
        visitor.connection.close()
