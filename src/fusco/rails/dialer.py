"""Connects the rails of a channel, and connects those again that have failed."""

from __future__ import annotations

import errno
import os
import socket
import time
from dataclasses import dataclass

from fusco.core.errors import reason_of
from fusco.rails.address import Address
from fusco.rails.channel import Channel
from fusco.rails.connection import Connection, bind_to, configure
from fusco.rails.handshake import EndpointInfo, Handshake, Joining
from fusco.rails.host import Host
from fusco.rails.loop import READ, WRITE

_RETRY_S = 0.05  # between attempts
# The kernel repeats a lost SYN after 1, 3, ... seconds; a new attempt is sooner. It gets more time only as long as none
# on the rail has succeeded; then it gets what the network needs.
_FIRST_ATTEMPT_S, _LONGEST_ATTEMPT_S = 0.3, 5.0
_AGAIN_S, _TIMES_THE_LAST = 0.1, 3
_HANDSHAKE_S = 0.5  # once the kernel of the peer has accepted; the peer may be busy


@dataclass
class _Rail:
    """Attempts on one rail."""

    next_s: float = 0.0  # when to try again
    begun_s: float = 0.0  # when the attempt began, of time.monotonic
    limit_s: float = _FIRST_ATTEMPT_S  # of the next attempt
    was_connected: bool = False  # an attempt has reached the peer's kernel
    incarnation: int = 0
    connecting: socket.socket | None = None  # the attempt under way
    deadline: float = 0.0
    is_refused: bool = False  # by the last attempt: the peer's host is there, but does not listen


class Dialer:
    """The connecting end of a channel; belongs to the endpoint's thread."""

    def __init__(self, host: Host, channel: Channel, address: Address) -> None:
        self.channel, self._host, self._address = channel, host, address
        self._rails = [_Rail() for _ in range(channel.num_rails)]

    def check(self, now: float, links: int) -> None:
        """Begin attempts on rails that are not connected and give up late ones; ``links``: as of ``Channel.check``."""
        connected = self.channel.usable
        for i, rail in enumerate(self._rails):
            if rail.connecting is not None:
                if now > rail.deadline or not links >> i & 1:
                    self._failed(i, now, "no answer")
            elif not connected >> i & 1 and not links >> i & 1:
                self.channel.note_failure(i, "the interface has no link")
            elif not connected >> i & 1 and now >= rail.next_s:
                self._dial(i, now)
        if not connected and all(rail.is_refused for rail in self._rails):
            self.channel.peer_is_gone("it listens no more")

    def close(self) -> None:
        """Give up all attempts."""
        for rail in self._rails:
            if rail.connecting is not None:
                self._host.loop.forget(rail.connecting.fileno())
                rail.connecting.close()
                rail.connecting = None

    def _dial(self, i: int, now: float) -> None:
        rail, (host, port) = self._rails[i], self._address.rails[i]
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            rail.connecting = socket.socket(family, socket.SOCK_STREAM)
        except OSError as error:  # no descriptor is left
            rail.next_s = now + _RETRY_S
            self.channel.note_failure(i, reason_of(error))
            return
        rail.incarnation, rail.deadline, rail.begun_s = rail.incarnation + 1, now + rail.limit_s, time.monotonic()
        try:
            configure(rail.connecting, defers=self._host.defers(i))
            bind_to(rail.connecting, self._host.rails[i].interface, self._host.rails[i].address)
            code = rail.connecting.connect_ex((host, port))
        except OSError as error:
            code = error.errno or errno.EIO
        if code not in (0, errno.EINPROGRESS):
            self._failed(i, now, os.strerror(code), is_refused=code == errno.ECONNREFUSED)
            return
        self._host.loop.watch(rail.connecting.fileno(), WRITE, lambda _events: self._connected(i, now))

    def _connected(self, i: int, now: float) -> None:
        """Begin the handshake, unless connecting has failed."""
        rail = self._rails[i]
        connecting = rail.connecting
        assert connecting is not None
        if code := connecting.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self._failed(i, now, os.strerror(code), is_refused=code == errno.ECONNREFUSED)
            return
        rail.limit_s = max(_AGAIN_S, _TIMES_THE_LAST * (time.monotonic() - rail.begun_s))
        rail.was_connected, rail.deadline = True, rail.deadline + _HANDSHAKE_S
        this = EndpointInfo(
            self._host.worker, len(self._host.rails), self._host.limits.chunk_bytes,
            self.channel.name, i, rail.incarnation,
        )  # fmt: skip
        handshake = Handshake(self._address.secret, this, is_server=False)
        joining = Joining(connecting, handshake, lambda _joining, reason: self._joined(i, now, reason))
        self._host.loop.watch(connecting.fileno(), READ, joining.on_event)

    def _joined(self, i: int, now: float, reason: str) -> None:
        rail = self._rails[i]
        if reason:
            self._failed(i, now, reason)
            return
        assert rail.connecting is not None
        connected, rail.connecting = rail.connecting, None
        rail.is_refused = False
        self._host.loop.forget(connected.fileno())
        self.channel.attach(Connection(connected, i, rail.incarnation))

    def _failed(self, i: int, now: float, reason: str, *, is_refused: bool = False) -> None:
        rail = self._rails[i]
        assert rail.connecting is not None
        self._host.loop.forget(rail.connecting.fileno())
        rail.connecting.close()
        rail.connecting, rail.next_s, rail.is_refused = None, now + _RETRY_S, is_refused
        if not rail.was_connected:
            rail.limit_s = min(2 * rail.limit_s, _LONGEST_ATTEMPT_S)
        self.channel.note_failure(i, reason)
