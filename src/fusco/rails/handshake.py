"""Handshake of a connection: each end proves that it knows the secret of the address.

The server sends a nonce; the client answers with who it is and a tag of that and the nonce; the server replies with
who it is and a tag of both nonces. A recorded handshake is refused, since no nonce is used twice.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass

_MAGIC = b"FUSCORL1"
_NONCE_BYTES, _TAG_BYTES, SECRET_BYTES = 16, 32, 32
CHANNEL_BYTES = 16  # of the random number that names a channel
_HELLO = struct.Struct(f"<8s{_NONCE_BYTES}s")
_CLIENT = struct.Struct(f"<8s{CHANNEL_BYTES}sIIIII{_NONCE_BYTES}s")
_SERVER = struct.Struct("<8sIII")
MAX_BYTES = max(_CLIENT.size, _SERVER.size) + _TAG_BYTES  # of a handshake message


class RefusedError(Exception):
    """The other end does not know the secret, or is not an endpoint of this version."""


@dataclass(frozen=True)
class EndpointInfo:
    """Identity of one end of a connection."""

    worker: int  # its number on its host
    num_rails: int  # rails of its host
    chunk_bytes: int  # bytes of its chunks
    channel: bytes = bytes(CHANNEL_BYTES)  # names the channel; the client's, 16 bytes
    rail: int = 0  # the rail of this connection; the client's
    incarnation: int = 0  # counts the client's connections of this channel and rail


class Handshake:
    """One end's part, without I/O: write ``greeting``, then ``receive`` every message of ``num_expected`` bytes."""

    def __init__(self, secret: bytes, this: EndpointInfo, *, is_server: bool) -> None:
        self._secret, self._this, self._is_server = secret, this, is_server
        self._nonce, self._peer_nonce = secrets.token_bytes(_NONCE_BYTES), b""
        self.peer: EndpointInfo | None = None  # once it has proven that it knows the secret
        self.greeting = _HELLO.pack(_MAGIC, self._nonce) if is_server else b""
        self.num_expected = _CLIENT.size + _TAG_BYTES if is_server else _HELLO.size

    def receive(self, message: bytes) -> bytes:
        """Take the next message and return the answer, which may be empty; ``RefusedError`` if it is not a peer's."""
        assert len(message) == self.num_expected, (len(message), self.num_expected)
        if not message.startswith(_MAGIC):
            raise RefusedError("the other end is not an endpoint of fusco.rails of this version")
        if self._is_server:
            return self._answer_client(message)
        if not self._peer_nonce:
            self._peer_nonce, self.num_expected = _HELLO.unpack(message)[1], _SERVER.size + _TAG_BYTES
            this = self._this
            sizes = (this.worker, this.num_rails, this.chunk_bytes, this.rail, this.incarnation)
            body = _CLIENT.pack(_MAGIC, this.channel, *sizes, self._nonce)
            return body + self._tag(b"client", body)
        self._check(message, b"server", _SERVER.size)
        self.peer = EndpointInfo(*_SERVER.unpack_from(message)[1:])
        return b""

    def _answer_client(self, message: bytes) -> bytes:
        self._peer_nonce = message[_CLIENT.size - _NONCE_BYTES : _CLIENT.size]
        self._check(message, b"client", _CLIENT.size)
        _, channel, worker, num_rails, chunk_bytes, rail, incarnation, _ = _CLIENT.unpack_from(message)
        if not chunk_bytes or not num_rails:
            raise RefusedError(f"the client claims chunks of {chunk_bytes} bytes and {num_rails} rails")
        self.peer = EndpointInfo(worker, num_rails, chunk_bytes, channel, rail, incarnation)
        body = _SERVER.pack(_MAGIC, self._this.worker, self._this.num_rails, self._this.chunk_bytes)
        return body + self._tag(b"server", body)

    def _check(self, message: bytes, role: bytes, num_body: int) -> None:
        if not hmac.compare_digest(message[num_body:], self._tag(role, message[:num_body])):
            raise RefusedError("the other end does not know the secret of the address")

    def _tag(self, role: bytes, body: bytes) -> bytes:
        """Authenticate a message; ordered by role, so that no end's message can be sent back to it as its peer's."""
        nonces = (self._nonce, self._peer_nonce) if self._is_server else (self._peer_nonce, self._nonce)
        return hmac.digest(self._secret, b"".join((role, *nonces, body)), "sha256")


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
