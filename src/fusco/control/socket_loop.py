"""Sockets of one thread that never block, each with a function that is called when it is ready."""

from __future__ import annotations

import selectors
import socket
from collections.abc import Callable
from contextlib import AbstractContextManager

READ, WRITE, NOTHING = selectors.EVENT_READ, selectors.EVENT_WRITE, 0

# Does what is possible now; returns the events that the socket awaits next, or ``NOTHING`` to leave the loop.
Step = Callable[[], int]


class SocketLoop(AbstractContextManager["SocketLoop"]):
    """Calls each socket's step when the socket is ready; ``close``, or the end of a ``with``, closes all sockets."""

    def __init__(self) -> None:
        self._poll = selectors.PollSelector()  # needs no descriptor: the process may have none left

    def __len__(self) -> int:
        return len(self._poll.get_map() or ())

    def __exit__(self, *_: object) -> None:
        self.close()

    def add(self, connection: socket.socket, step: Step, events: int = READ) -> None:
        """Call ``step`` whenever one of ``events`` has come; what it raises, ``turn`` raises."""
        connection.settimeout(0)
        self._poll.register(connection, events, step)

    def forget(self, connection: socket.socket) -> None:
        """Call a socket's step no more."""
        self._poll.unregister(connection)

    def turn(self, timeout_s: float | None) -> bool:
        """Wait for sockets and call the steps of those that are ready; return False after ``timeout_s`` without any."""
        ready = self._poll.select(timeout_s)
        for key, _ in ready:
            at = self._poll.get_map().get(key.fd)
            if at is None or at.data is not key.data:
                continue  # an earlier step has removed it
            if (events := key.data()) == NOTHING:
                self._poll.unregister(key.fileobj)
            elif events != key.events:
                self._poll.modify(key.fileobj, events, key.data)
        return bool(ready)

    def close(self) -> None:
        """Close all sockets."""
        for key in list((self._poll.get_map() or {}).values()):
            assert isinstance(key.fileobj, socket.socket)
            key.fileobj.close()
        self._poll.close()
