"""Hello of a connection, and its listener: both ends prove that they know a secret, by the challenge of the rails.

The server sends a nonce. The client answers with a request and a tag, the server with an answer and a tag: HMAC-SHA256
of the sender's role, both nonces and the bytes sent. So the secret does not travel, a recorded hello is refused, and no
message can be sent back to its sender. Nothing is encrypted. Requests of status have no challenge: sent again, they do
nothing that the first has not done.
"""

from __future__ import annotations

import hmac
import os
import selectors
import socket
import struct
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

MAX_BODY_BYTES = 1 << 16  # of a request or an answer
NONCE_BYTES, TAG_BYTES = 16, 32
_MAGIC = b"FUSCOCT1"
_SIZE = struct.Struct("!I")
CHALLENGE_BYTES = len(_MAGIC) + NONCE_BYTES
READ, WRITE, NOTHING = selectors.EVENT_READ, selectors.EVENT_WRITE, 0
# Does what is possible now; returns the events that the socket awaits next, or ``NOTHING`` to leave the loop.
Step = Callable[[], int]
# Ranks authenticate at once. Connections that stay unauthenticated are not of ranks.
_MAX_CLIENTS = 256
_BACKLOG = 1024  # all ranks may connect at once, and foreign clients before them


def tag_of(secret: bytes, role: bytes, nonces: bytes, body: bytes) -> bytes:
    """Return the tag of a message of the ``role`` ``b"client"`` or ``b"server"``; ``nonces``: the server's first."""
    return hmac.digest(secret, role + nonces + body, "sha256")


class _Body:
    """A body that arrives: prefix, size, bytes, tag. Bytes behind it stay in the socket."""

    def __init__(self, num_prefix_bytes: int) -> None:
        self._num_prefix_bytes, self._received = num_prefix_bytes, bytearray()
        self._num_expected = num_prefix_bytes + _SIZE.size

    def receive(self, connection: socket.socket) -> bool:
        """Receive what is there; return whether all is. Raises ``OSError``, also for a size that is none."""
        while len(self._received) < self._num_expected:
            try:
                self._received += _receive(connection, self._num_expected - len(self._received))
            except BlockingIOError:
                return False
            if len(self._received) == (head := self._num_prefix_bytes + _SIZE.size):
                size: int = _SIZE.unpack(self._received[-_SIZE.size :])[0]
                if size > MAX_BODY_BYTES:
                    raise ConnectionError(f"the other end announced {size} bytes; at most {MAX_BODY_BYTES} are allowed")
                self._num_expected = head + size + TAG_BYTES
        return True

    @property
    def prefix(self) -> bytes:
        return bytes(self._received[: self._num_prefix_bytes])

    def authenticated(self, secret: bytes, role: bytes, nonces: bytes) -> bytes:
        """Return the body; ``ConnectionError`` if its tag is wrong."""
        body = bytes(self._received[self._num_prefix_bytes + _SIZE.size : -TAG_BYTES])
        if not hmac.compare_digest(self._received[-TAG_BYTES:], tag_of(secret, role, nonces, body)):
            raise ConnectionError("the other end does not know the secret")
        return body


class ServerHello:
    """The server's end of a connection that has just been accepted."""

    def __init__(self, connection: socket.socket, secret: bytes, *, challenges: bool = True) -> None:
        """Send the challenge; raises ``OSError`` if the client has closed the connection again."""
        self.connection, self._secret = connection, secret
        self._nonces = os.urandom(NONCE_BYTES) if challenges else b""
        self._request = _Body(NONCE_BYTES)
        if challenges:
            connection.send(_MAGIC + self._nonces, socket.MSG_NOSIGNAL)

    def request(self) -> bytes | None:
        """Return the client's request, ``None`` until it is there; ``OSError`` unless it comes from one that may."""
        if not self._request.receive(self.connection):
            return None
        self._nonces += self._request.prefix
        return self._request.authenticated(self._secret, b"client", self._nonces)

    def answer(self, body: bytes) -> None:
        """Answer the request; ``body`` is short enough for any socket's buffer."""
        tag = tag_of(self._secret, b"server", self._nonces, body)
        self.connection.send(_SIZE.pack(len(body)) + body + tag, socket.MSG_NOSIGNAL)


class ClientHello:
    """The client's end of a connection that is being made; close ``connection`` when it is no longer needed."""

    def __init__(
        self, address: tuple[str, int], secret: bytes, request: bytes, *, awaits_challenge: bool = True
    ) -> None:
        """Begin to connect to an IPv4 address; raises ``OSError``.

        Without a challenge the request is sent at once, so that a stopped process has it when it continues.
        """
        self.connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self.connection.settimeout(0)
        self._secret, self._request, self._nonces = secret, request, b""
        self._challenge, self._rest, self._answer = bytearray(), b"", _Body(0)
        if not awaits_challenge:
            self._challenge = bytearray(_MAGIC.ljust(CHALLENGE_BYTES))
            self._send_request(b"")
        try:
            self.connection.connect(address)
        except BlockingIOError:
            pass
        except OSError:
            self.connection.close()
            raise

    def advance(self) -> bytes | int:
        """Do what is possible; return the server's answer, or the event to await for it. Raises ``OSError``."""
        while len(self._challenge) < CHALLENGE_BYTES:
            try:
                self._challenge += _receive(self.connection, CHALLENGE_BYTES - len(self._challenge))
            except BlockingIOError:
                return READ
            if len(self._challenge) == CHALLENGE_BYTES:
                self._answer_challenge()
        if self._rest:
            try:
                self._rest = self._rest[self.connection.send(self._rest, socket.MSG_NOSIGNAL) :]
            except BlockingIOError:
                return WRITE
            if self._rest:
                return WRITE
        if not self._answer.receive(self.connection):
            return READ
        return self._answer.authenticated(self._secret, b"server", self._nonces)

    def _answer_challenge(self) -> None:
        if not self._challenge.startswith(_MAGIC):
            raise ConnectionError("the other end is not a rank of this version of fusco")
        self._send_request(bytes(self._challenge[len(_MAGIC) :]))

    def _send_request(self, server_nonce: bytes) -> None:
        nonce = os.urandom(NONCE_BYTES)
        self._nonces = server_nonce + nonce
        tag = tag_of(self._secret, b"client", self._nonces, self._request)
        self._rest = nonce + _SIZE.pack(len(self._request)) + self._request + tag


def _receive(connection: socket.socket, num_bytes: int) -> bytes:
    """Return at least one byte, ``num_bytes`` at most; ``ConnectionError`` at the end of the connection."""
    if received := connection.recv(num_bytes):
        return received
    raise ConnectionResetError("the other end closed the connection")


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
