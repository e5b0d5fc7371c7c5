"""Control messages between nodes: complete, in order, from authenticated peers; errors name the peer that has gone."""

from __future__ import annotations

import signal
import threading
import time

import pytest
from meshes import LIMIT_S, exchange, mesh_of, transport_of

from store_gathers import on_ranks


@pytest.mark.parametrize("num_bytes", [1, 1000, 20_000_000])  # the last one more than any socket holds
def test_every_rank_receives_the_messages_of_all_others_in_every_round(num_bytes):
    num_rounds = 3 if num_bytes > 1000 else 200

    def talk(store_gather):
        mesh, others = mesh_of(store_gather), [rank for rank in range(3) if rank != store_gather.rank]
        try:
            return [
                exchange(mesh, bytes([16 * number % 256 + store_gather.rank]) * num_bytes, others)
                for number in range(num_rounds)
            ]
        finally:
            mesh.transport.close()

    for rank, rounds in on_ranks(3, talk).items():
        for number, received in enumerate(rounds):
            assert received == {
                peer: bytes([16 * number % 256 + peer]) * num_bytes for peer in range(3) if peer != rank
            }


def test_a_rank_may_be_a_round_ahead():
    first_is_done = threading.Event()

    def talk(store_gather):
        mesh, peer = mesh_of(store_gather), 1 - store_gather.rank
        first = exchange(mesh, b"first", [peer])
        if store_gather.rank == 0:
            mesh.begin({1: b"again"}, {1: memoryview(again := bytearray(5))})
            first_is_done.set()
            while not mesh.is_done:
                mesh.poll()
            second = {1: bytes(again)}
        else:
            first_is_done.wait(LIMIT_S)
            second = exchange(mesh, b"again", [peer])
        mesh.transport.close()
        return first, second

    assert on_ranks(2, talk) == {rank: ({1 - rank: b"first"}, {1 - rank: b"again"}) for rank in range(2)}


@pytest.mark.parametrize("num_behind", [0, 1, 3_000_000])  # the last one is more than sockets take at once
def test_a_message_may_be_longer_than_the_memory_of_its_first_part(num_behind):
    """Its first byte says here how much follows; the next round's message may be right behind."""

    def talk(store_gather):
        mesh, peer = mesh_of(store_gather), 1 - store_gather.rank
        rounds = []
        for size in (num_behind + store_gather.rank, 0, num_behind):
            first, behind = bytearray(9), bytearray()

            def memory_behind(src, first=first, behind=behind):
                behind += bytes(int.from_bytes(first[1:], "big"))
                return memoryview(behind) if src == peer else None

            message = b"x" + size.to_bytes(8, "big") + bytes([size % 251]) * size
            mesh.begin({peer: message}, {peer: memoryview(first)}, memory_behind)
            deadline, complete = time.monotonic() + LIMIT_S, []
            while not mesh.is_done and time.monotonic() < deadline:
                complete += mesh.poll()
            rounds.append((complete, bytes(first[:1]), bytes(behind)))
        mesh.transport.close()
        return rounds

    for rank, rounds in on_ranks(2, talk).items():
        peer = 1 - rank
        for size, received in zip((num_behind + peer, 0, num_behind), rounds, strict=True):
            assert received == ([peer], b"x", bytes([size % 251]) * size)


@pytest.mark.parametrize("num_at_first", [9, 12])  # all of the first part, or some bytes behind it, too
def test_the_rest_of_a_message_may_come_later_than_its_first_part(num_at_first):
    message, has_polled = b"x" + (5).to_bytes(8, "big") + b"later", threading.Event()

    def talk(store_gather):
        mesh = mesh_of(store_gather)
        if store_gather.rank == 1:
            connection = mesh.transport._connections[0]
            connection.sendall(message[:num_at_first])
            has_polled.wait(LIMIT_S)
            connection.sendall(message[num_at_first:])
            return mesh.transport.close()
        first, behind = bytearray(9), bytearray(5)
        mesh.begin({}, {1: memoryview(first)}, lambda _: memoryview(behind))
        deadline, early = time.monotonic() + LIMIT_S, []
        while first[:1] != b"x" and time.monotonic() < deadline:
            early += mesh.poll()
        early += mesh.poll()
        has_polled.set()
        complete = []
        while not mesh.is_done and time.monotonic() < deadline:
            complete += mesh.poll()
        mesh.transport.close()
        return early, complete, bytes(behind)

    assert on_ranks(2, talk)[0] == ([], [1], b"later")


def test_rounds_that_were_begun_outside_go_on_and_leave_nothing_behind():
    message, num_sent = b"a record", 3

    def talk(store_gather):
        mesh, peer, rounds = mesh_of(store_gather), 1 - store_gather.rank, []
        exchange(mesh, message, [peer])
        for _ in range(3):
            mesh.transport._connections[peer].sendall(message[:num_sent])
            to = {peer: memoryview(memory := bytearray(len(message)))}
            mesh.begin({peer: message}, to, peer_to_moved={peer: (num_sent, 0)})
            deadline = time.monotonic() + LIMIT_S
            while not mesh.is_done and time.monotonic() < deadline:
                mesh.poll()
            rounds.append((bytes(memory), len(mesh._tickets)))
        mesh.transport.close()
        return rounds

    assert on_ranks(2, talk) == {rank: [(message, 2)] * 3 for rank in range(2)}


def test_a_peer_that_has_gone_is_named():
    def talk(store_gather):
        mesh = mesh_of(store_gather)
        exchange(mesh, b"first", [1 - store_gather.rank])
        if store_gather.rank == 1:
            mesh.transport.close()
            return None
        mesh.begin({1: b"again"}, {1: memoryview(bytearray(5))})
        deadline = time.monotonic() + LIMIT_S
        while not mesh.transport.failure and time.monotonic() < deadline:
            mesh.poll()
        mesh.transport.close()
        return mesh.transport.failure

    failure = on_ranks(2, talk)[0]
    assert failure.startswith(("the network failed to receive (rank 1)", "the network failed to send (rank 1)"))


def test_a_peer_that_has_gone_raises_no_signal():
    """Programs that shall end quietly when their output is closed let SIGPIPE kill them."""
    signals, has_gone = [], threading.Event()

    def talk(store_gather):
        transport = transport_of(store_gather)
        if store_gather.rank == 1:
            transport.close()
            has_gone.set()
            return None
        has_gone.wait(LIMIT_S)
        for _ in range(3):  # the first one may still be sent
            transport.send(memoryview(b"again"), 1)
            time.sleep(0.05)
        transport.close()
        return transport.failure

    before = signal.signal(signal.SIGPIPE, lambda number, _: signals.append(number))
    try:
        failure = on_ranks(2, talk)[0]
    finally:
        signal.signal(signal.SIGPIPE, before)
    assert failure.startswith("the network failed to send (rank 1)")
    assert not signals
