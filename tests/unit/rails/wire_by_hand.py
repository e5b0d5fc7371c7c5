"""The wire as its description says (``engine/engine.h``), in Python: records, and the client's part of a handshake."""

from __future__ import annotations

import secrets
import socket
import struct
from typing import NamedTuple

from fusco.control.hello import tag_of

RECORD_BYTES, MAGIC = 32, 0xF5C1
DATA, GRANT, ACK, TOO_LARGE, RAIL_DOWN, BYE = range(1, 7)
_RECORD = struct.Struct("<QQIIIHH")
_HANDSHAKE = b"FUSCORL1"
_CLIENT = struct.Struct("<8s16sIIIII16s")
HELLO_BYTES, ANSWER_BYTES = 24, 20 + 32


class Record(NamedTuple):
    seq: int = 0
    size: int = 0
    slot: int = 0
    mask: int = 0
    epoch: int = 0
    kind: int = 0
    magic: int = MAGIC


def pack(record):
    return _RECORD.pack(*record)


def unpack(data):
    return Record._make(_RECORD.unpack(data))


def read_record(connected):
    return unpack(connected.recv(RECORD_BYTES, socket.MSG_WAITALL))


def introduction(hello, secret, name, rail, chunk_bytes=65536, num_rails=3, claims=None):
    """What a client answers to the server's greeting; it may claim another rail than that of its connection."""
    nonce = secrets.token_bytes(16)
    rail = rail if claims is None else claims
    body = _CLIENT.pack(_HANDSHAKE, name, 0, num_rails, chunk_bytes, rail, 1, nonce)
    return body + tag_of(secret, b"client", hello[8:] + nonce, body)


def connected_by_hand(address, name, rail, chunk_bytes=65536, num_received_bytes=0):
    """A socket of a peer that the test plays, after its handshake; it may have a small receive buffer."""
    client = socket.socket()
    if num_received_bytes:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, num_received_bytes)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 5, 0))  # it blocks, for MSG_WAITALL
    client.connect(address.rails[rail])
    hello = client.recv(HELLO_BYTES, socket.MSG_WAITALL)
    sent = introduction(hello, address.secret, name, rail, chunk_bytes)
    client.sendall(sent)
    answer = client.recv(ANSWER_BYTES, socket.MSG_WAITALL)
    expected = tag_of(address.secret, b"server", hello[8:] + sent[44:60], answer[:20])
    assert answer[20:] == expected  # the server knows the secret, too
    return client
