"""A connection before its handshake is complete."""

from __future__ import annotations

import socket
from collections.abc import Callable

from fusco.rails.handshake import Handshake, RefusedError


class Joining:
    """Drives a handshake over a socket that never blocks."""

    def __init__(self, joining: socket.socket, handshake: Handshake, finish: Callable[[Joining, str], None]) -> None:
        """Begin; ``finish`` is called once, with this object and why it failed, empty if it did not.

        Raises ``OSError`` if the other end has closed it already.
        """
        self.socket, self.handshake = joining, handshake
        self._finish, self._received = finish, bytearray()
        if handshake.greeting:
            joining.send(handshake.greeting, socket.MSG_NOSIGNAL)  # the buffer of a new socket holds it

    def on_event(self, _events: int) -> None:
        """Read, answer, and finish when the handshake is complete or has failed."""
        try:
            while self.handshake.peer is None:
                piece = self.socket.recv(self.handshake.num_expected - len(self._received))
                if not piece:
                    self._finish(self, "the other end closed the connection")
                    return
                self._received += piece
                if len(self._received) == self.handshake.num_expected:
                    message = bytes(self._received)
                    self._received.clear()
                    if answer := self.handshake.receive(message):
                        self.socket.send(answer, socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return
        except (OSError, RefusedError) as error:
            self._finish(self, getattr(error, "strerror", None) or str(error))
            return
        self._finish(self, "")
