"""Connections: foreign ones, garbage, replays, and chunks that are late."""

import os
import socket
import time
from contextlib import suppress

import numpy as np
import pytest
from rails_ends import RAILS, connected, random_bytes, wait_for

from fusco.core.errors import TransportError
from fusco.rails import Endpoint
from fusco.rails.connection import Connection
from fusco.rails.handshake import EndpointInfo, Handshake
from fusco.rails.wire import DATA, Record, WireError, pack


def test_foreign_connections_are_refused(tmp_path):
    rng = np.random.default_rng(2)
    with connected(tmp_path) as (a, b), socket.socket() as silent:
        listening = [b._connections[rail].socket.getsockname() for rail in range(3)]
        silent.connect(listening[0])
        for i in range(30):
            with socket.create_connection(listening[i % 3]) as foreign:
                foreign.settimeout(5.0)
                foreign.recv(24, socket.MSG_WAITALL)
                garbage = rng.integers(0, 256, int(rng.integers(0, 300)), dtype=np.uint8).tobytes()
                with suppress(OSError):  # it may be closed before all of that is sent
                    foreign.sendall(garbage)
                    foreign.shutdown(socket.SHUT_WR)
                    assert foreign.recv(1) == b""  # nothing but the greeting is ever answered
        message, buffer = random_bytes(300_000), bytearray(300_000)
        received, sent = b.irecv(buffer), a.isend(message)
        assert (received.wait(), sent.wait()) == (300_000, 300_000)
        assert buffer == message.tobytes()
        assert a.rails == b.rails == (0, 1, 2)


@pytest.mark.parametrize(("claimed", "listener", "num_rails"), [(1, 0, 3), (2, 2, 1)])
def test_rails_that_a_client_cannot_have(tmp_path, claimed, listener, num_rails):
    with Endpoint(worker=0, rails=RAILS, board=tmp_path / "a") as endpoint:
        address = endpoint.listen()
        this = EndpointInfo(1, num_rails, 4096, b"c" * 16, claimed, 1)
        handshake = Handshake(address.secret, this, is_server=False)
        with socket.create_connection(address.rails[listener]) as client:
            client.sendall(handshake.receive(client.recv(handshake.num_expected, socket.MSG_WAITALL)))
            client.recv(handshake.num_expected, socket.MSG_WAITALL)
            assert client.recv(1) == b""
        wait_for(lambda: endpoint.num_refused == 1)
        with pytest.raises(TransportError):
            endpoint.accept(0.01)


@pytest.mark.parametrize(
    "data",
    [
        b"\x00" * 32,
        os.urandom(100),
        pack(Record(seq=99, size=10, slot=0, mask=10, kind=DATA)) + b"0123456789",
        pack(Record(seq=0, size=2**60, slot=0, mask=2**31, kind=DATA)),
        pack(Record(seq=5, slot=3, kind=3)),
    ],
    ids=["zeros", "garbage", "not granted", "too large", "never sent"],
)
def test_garbage_of_a_peer_costs_its_rail_only(tmp_path, data):
    message = random_bytes(2_000_000)
    with connected(tmp_path) as (a, b):
        buffer = bytearray(len(message))
        received = b.irecv(buffer)
        wait_for(lambda: a._sends._early_grants)
        broken = a._connections[1]
        a._host.loop.post(lambda: broken.socket.send(data))
        wait_for(lambda: a._connections.get(1) not in (None, broken))
        sent = a.isend(message)
        assert (received.wait(), sent.wait()) == (len(message), len(message))
        assert buffer == message.tobytes()


def test_chunks_that_are_replayed_change_nothing(tmp_path):
    with connected(tmp_path) as (a, b):
        buffer = bytearray(5)
        received, sent = b.irecv(buffer), a.isend(b"first")
        sent.wait()
        received.wait()
        replay = pack(Record(seq=0, size=5, slot=0, mask=5, kind=DATA)) + b"XXXXX"
        old = a._connections[0]
        a._host.loop.post(lambda: old.socket.send(replay))
        wait_for(lambda: a._connections.get(0) not in (None, old))  # acknowledged, although nothing was sent
        received, sent = b.irecv(second := bytearray(6)), a.isend(b"second")
        assert (received.wait(), bytes(second), bytes(buffer)) == (6, b"second", b"first")


def test_chunks_that_are_late_are_sent_again_once_it_is_not_the_rule():
    with socket.socket() as unconnected:
        connection = Connection(unconnected, 1, 1)

        def send(chunk, seconds, checks_after):
            connection.send_chunk((0, chunk), (b"", memoryview(b"")))
            connection.outstanding[0, chunk].at_s = time.monotonic() - seconds
            late = connection.late_chunks(time.monotonic() - seconds + checks_after, 0.010)
            connection.outstanding[0, chunk].has_begun = True
            connection.acknowledged((0, chunk))
            return late

        assert [send(i, 0.002, 0.009) for i in range(20)] == [[]] * 20
        assert send(20, 0.100, 0.100) == [(0, 20)]
        assert send(21, 0.002, 0.015) == []  # the limit has grown a little
        assert [bool(send(30 + i, 0.040, 0.040)) for i in range(12)][-4:] == [False] * 4  # the rail has become slow


def test_a_chunk_is_not_acknowledged_before_it_is_written():
    ends = socket.socketpair()
    with ends[0], ends[1]:
        connection = Connection(ends[0], 1, 1)
        connection.send_chunk((0, 0), (b"header", memoryview(b"payload")))
        with pytest.raises(WireError, match="chunk 0 of message 0 was acknowledged, but not sent"):
            connection.acknowledged((0, 0))
        connection.write()
        assert connection.acknowledged((0, 0)) is not None
