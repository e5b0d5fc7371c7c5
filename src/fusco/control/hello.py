"""Hello of a connection: both ends prove that they know a secret, by the challenge that ``fusco.rails`` has, too.

The server sends a nonce. The client answers with a request and a tag, the server with an answer and a tag: HMAC-SHA256
of the sender's role, both nonces and the bytes sent. So the secret does not travel, a recorded hello is refused, and no
message can be sent back to its sender. Nothing is encrypted. Requests of status have no challenge: sent again, they do
nothing that the first has not done.
"""

from __future__ import annotations

import hmac
import os
import socket
import struct

from fusco.control.socket_loop import READ, WRITE

MAX_BODY_BYTES = 1 << 16  # of a request or an answer
NONCE_BYTES, TAG_BYTES = 16, 32
_MAGIC = b"FUSCOCT1"
_SIZE = struct.Struct("!I")
CHALLENGE_BYTES = len(_MAGIC) + NONCE_BYTES


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
