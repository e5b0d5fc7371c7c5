"""Connections: foreign ones, garbage, replays, messages of hostile peers, and peers whose process ends."""

import socket
import time
from contextlib import contextmanager, suppress

import numpy as np
import pytest
from rails_ends import LIMITS, RAILS, wait_for
from wire_by_hand import (
    ACK,
    ANSWER_BYTES,
    BYE,
    DATA,
    GRANT,
    HELLO_BYTES,
    RAIL_DOWN,
    Record,
    connected_by_hand,
    introduction,
    pack,
    read_record,
)

from fusco.core.errors import PeerFailureError, TransportError
from fusco.rails import Endpoint


@contextmanager
def hostile_peer(tmp_path, rails=(0, 1), **options):
    """A channel of an endpoint with two rails to a peer that the test plays, and the peer's sockets."""
    with Endpoint(worker=0, rails=RAILS, board=tmp_path / "a", limits=LIMITS, timeout_s=20.0) as endpoint:
        address = endpoint.listen()
        sockets = [connected_by_hand(address, b"n" * 16, rail, **options) for rail in rails]
        channel = endpoint.accept()
        wait_for(lambda: channel.rails == rails)
        yield channel, sockets
        for each in sockets:
            each.close()


def test_foreign_connections_are_refused(tmp_path):
    rng = np.random.default_rng(2)
    with Endpoint(worker=0, rails=RAILS, board=tmp_path / "a", limits=LIMITS) as endpoint, socket.socket() as silent:
        address = endpoint.listen()
        recorded = []
        silent.connect(address.rails[0])
        for i in range(40):
            with socket.create_connection(address.rails[i % 3]) as foreign:
                foreign.settimeout(5.0)
                hello = foreign.recv(HELLO_BYTES, socket.MSG_WAITALL)
                answer = introduction(hello, address.secret, bytes([i]) * 16, i % 3)
                flipped = bytearray(answer)
                flipped[int(rng.integers(len(answer)))] ^= 1 << int(rng.integers(8))
                garbage = rng.integers(0, 256, int(rng.integers(0, 300)), dtype=np.uint8).tobytes()
                reflected = (hello + bytes(200))[: len(answer)]
                foreign_secret = introduction(hello, bytes(32), bytes(16), i % 3)
                replayed = recorded[0] if recorded else b""
                recorded.append(answer)
                with suppress(OSError):  # it may be closed before all of that is sent
                    foreign.sendall([garbage, bytes(flipped), foreign_secret, reflected, replayed][i % 5])
                    foreign.shutdown(socket.SHUT_WR)
                    assert foreign.recv(1) == b""  # nothing but the greeting is ever answered
        wait_for(lambda: endpoint.num_refused == 40)
        with pytest.raises(TransportError):
            endpoint.accept(0.01)


@pytest.mark.parametrize(("claimed", "listener", "num_rails"), [(1, 0, 3), (2, 2, 1)])
def test_rails_that_a_client_cannot_have(tmp_path, claimed, listener, num_rails):
    with Endpoint(worker=0, rails=RAILS, board=tmp_path / "a") as endpoint:
        address = endpoint.listen()
        with socket.create_connection(address.rails[listener]) as client:
            hello = client.recv(HELLO_BYTES, socket.MSG_WAITALL)
            client.sendall(
                introduction(hello, address.secret, b"c" * 16, listener, num_rails=num_rails, claims=claimed)
            )
            assert client.recv(ANSWER_BYTES) == b""
        wait_for(lambda: endpoint.num_refused == 1)
        with pytest.raises(TransportError):
            endpoint.accept(0.01)


def test_a_flood_of_connections_leaves_peers_their_handshake(tmp_path):
    with Endpoint(worker=0, rails=RAILS, board=tmp_path / "a") as endpoint:
        address, flood = endpoint.listen(), []
        with socket.create_connection(address.rails[0]) as client:
            hello = client.recv(HELLO_BYTES, socket.MSG_WAITALL)
            begin = time.monotonic()
            while len(flood) < 300:
                flood.append(socket.create_connection(address.rails[0]))
            if time.monotonic() - begin < 0.2:  # else this machine is too slow for a flood
                client.sendall(introduction(hello, address.secret, b"c" * 16, 0))
                assert len(client.recv(ANSWER_BYTES, socket.MSG_WAITALL)) == ANSWER_BYTES
        for each in flood:
            each.close()


def await_grant(peer, seq):
    while (record := read_record(peer)).kind != GRANT or record.seq != seq:
        pass


def test_a_peer_that_reconnects_without_reading_does_not_fill_memory(tmp_path):
    with hostile_peer(tmp_path, rails=(0,), num_received_bytes=4096) as (channel, _):
        address, most = channel._endpoint.listen(), 0
        for _ in range(256):
            channel.irecv(bytearray(1))
        for _ in range(600):  # each time all grants are repeated on the rail that is left: 8 KiB
            with suppress(OSError):
                connected_by_hand(address, channel.name, 1).close()
            most = max(most, channel._state.num_owed)
            if channel.is_closed or 0 not in channel.rails:
                break
        assert channel.is_closed or 0 not in channel.rails
        assert most < 3 << 20


def test_chunks_that_are_replayed_change_nothing(tmp_path):
    with hostile_peer(tmp_path) as (channel, (peer, _)):
        received = channel.irecv(buffer := bytearray(5))
        await_grant(peer, 0)
        peer.sendall(pack(Record(0, 5, 0, 5, kind=DATA)) + b"first")
        assert received.wait() == 5
        following = channel.irecv(bytearray(6))
        await_grant(peer, 1)
        peer.sendall(pack(Record(0, 5, 0, 5, kind=DATA)) + b"XXXXX" + pack(Record(1, 6, 0, 6, kind=DATA)) + b"second")
        assert following.wait() == 6
        assert buffer == b"first"


def test_what_a_peer_acknowledged_before_it_left_was_delivered(tmp_path):
    with hostile_peer(tmp_path) as (channel, (first, second)):
        sent, received = channel.isend(b"all"), channel.irecv(bytearray(1))
        first.sendall(pack(Record(0, 3, kind=GRANT)))
        used = next(each for each in (first, second) if _chunk_of(each) == b"all")
        used.sendall(pack(Record(0, 3, kind=ACK)) + pack(Record(kind=BYE)))
        for each in (first, second):
            each.close()
        assert sent.wait() == 3
        with pytest.raises(PeerFailureError, match="worker 0 has closed its channel"):
            received.wait()


def _chunk_of(connected):
    while (record := read_record(connected)).kind != DATA:
        pass
    return connected.recv(record.mask, socket.MSG_WAITALL)


def test_a_peer_whose_process_has_ended_is_lost_at_once(tmp_path):
    """At the end that was connected, too: the kernel ends connections in order, which no living peer does."""
    with hostile_peer(tmp_path) as (channel, sockets):
        received, begin = channel.irecv(bytearray(1)), time.monotonic()
        for each in sockets:
            read_record(each) if each is sockets[0] else None  # no byte unread, so the end is in order
            each.shutdown(socket.SHUT_WR)
        with pytest.raises(PeerFailureError, match="is unreachable, its process has ended: rail 0"):
            received.wait()
        assert time.monotonic() - begin < LIMITS.no_rail_s / 2


def test_a_peer_that_says_a_rail_is_down(tmp_path):
    with hostile_peer(tmp_path) as (channel, (_, tells)):
        tells.sendall(pack(Record(slot=0, epoch=1, kind=RAIL_DOWN)))
        wait_for(lambda: channel.rails == (1,))
