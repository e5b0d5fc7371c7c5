"""Messages of records between nodes: they come whole, in order, from whom they should; who is gone is named."""

from __future__ import annotations

import signal
import socket
import threading
import time
from contextlib import ExitStack, closing

import pytest

from fusco.control.tcp_mesh import Mail
from fusco.core.errors import PeerFailureError, TransportError
from rolls import on_ranks

SECRET = "0123456789abcdef" * 2
LIMIT_S = 20.0


def mail_of(roll, peers=None):
    others = [rank for rank in range(roll.world_size) if rank != roll.rank]
    return Mail(roll, others if peers is None else peers, "127.0.0.1", SECRET, roll.wait_until)


def exchange(mail, message, peers):
    """One round; what came, by peer."""
    places = {peer: bytearray(len(message)) for peer in peers}
    mail.begin(memoryview(message), {peer: memoryview(place) for peer, place in places.items()})
    came, deadline = [], time.monotonic() + LIMIT_S
    while not mail.is_done:
        came += mail.look()
        assert not mail.failure
        assert time.monotonic() < deadline
        time.sleep(0)
    assert sorted(came) == sorted(peers)
    return {peer: bytes(place) for peer, place in places.items()}


@pytest.mark.parametrize("num_bytes", [1, 1000, 20_000_000])  # the last one more than any socket holds
def test_everybody_gets_everybodys_messages_round_by_round(num_bytes):
    num_rounds = 3 if num_bytes > 1000 else 200

    def talk(roll):
        mail, others = mail_of(roll), [rank for rank in range(3) if rank != roll.rank]
        try:
            return [
                exchange(mail, bytes([16 * number % 256 + roll.rank]) * num_bytes, others)
                for number in range(num_rounds)
            ]
        finally:
            mail.close()

    for rank, rounds in on_ranks(3, talk).items():
        for number, came in enumerate(rounds):
            assert came == {peer: bytes([16 * number % 256 + peer]) * num_bytes for peer in range(3) if peer != rank}


def test_a_rank_may_be_a_round_ahead():
    first_is_done = threading.Event()

    def talk(roll):
        mail, peer = mail_of(roll), 1 - roll.rank
        first = exchange(mail, b"first", [peer])
        if roll.rank == 0:
            mail.begin(memoryview(b"again"), {1: memoryview(again := bytearray(5))})
            first_is_done.set()
            while not mail.is_done:
                mail.look()
            second = {1: bytes(again)}
        else:
            first_is_done.wait(LIMIT_S)
            second = exchange(mail, b"again", [peer])
        mail.close()
        return first, second

    assert on_ranks(2, talk) == {rank: ({1 - rank: b"first"}, {1 - rank: b"again"}) for rank in range(2)}


def test_only_peers_connect():
    peers = {0: [2], 1: [3], 2: [0], 3: [1]}

    def talk(roll):
        mail = mail_of(roll, peers[roll.rank])
        try:
            return exchange(mail, b"from %d" % roll.rank, peers[roll.rank])
        finally:
            mail.close()

    assert on_ranks(4, talk) == {rank: {peer: b"from %d" % peer for peer in of} for rank, of in peers.items()}


def test_without_peers_nothing_is_opened():
    def talk(roll):
        mail = mail_of(roll, [])
        mail.begin(memoryview(b"nobody"), {})
        return mail.is_done, mail.look()

    assert on_ranks(2, talk) == {rank: (True, []) for rank in range(2)}


def test_a_peer_that_has_gone_is_named():
    def talk(roll):
        mail = mail_of(roll)
        exchange(mail, b"first", [1 - roll.rank])
        if roll.rank == 1:
            mail.close()
            return None
        mail.begin(memoryview(b"again"), {1: memoryview(bytearray(5))})
        deadline = time.monotonic() + LIMIT_S
        while not mail.failure and time.monotonic() < deadline:
            mail.look()
        mail.close()
        return mail.failure

    failure = on_ranks(2, talk)[0]
    assert failure.startswith(("the network failed to receive (rank 1)", "the network failed to send (rank 1)"))


def test_a_peer_that_has_gone_raises_no_signal():
    """Programs that end quietly when a pipe of theirs closes have SIGPIPE kill them."""
    signals, has_gone = [], threading.Event()

    def talk(roll):
        mail = mail_of(roll)
        if roll.rank == 1:
            mail.close()
            has_gone.set()
            return None
        has_gone.wait(LIMIT_S)
        for _ in range(3):  # the first one may still leave
            mail.begin(memoryview(b"hello"), {1: memoryview(bytearray(5))})
            time.sleep(0.05)
            mail._leaving, mail._coming = {}, {}
        mail.close()
        return mail.failure

    before = signal.signal(signal.SIGPIPE, lambda number, _: signals.append(number))
    try:
        failure = on_ranks(2, talk)[0]
    finally:
        signal.signal(signal.SIGPIPE, before)
    assert failure.startswith("the network failed to send (rank 1)")
    assert not signals


def test_a_peer_that_does_not_come_is_named_and_nothing_is_left_open():
    before = threading.active_count()
    error = on_ranks(3, mail_of, absent=(2,), timeout_s=0.3)[0]
    assert isinstance(error, PeerFailureError)
    assert error.peers == (2,)
    deadline = time.monotonic() + LIMIT_S
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() == before


def test_a_peer_that_does_not_connect_is_not_waited_for_beyond_the_limit():
    before = threading.active_count()

    def come(roll):
        if roll.rank == 0:
            return mail_of(roll)
        with socket.create_server(("127.0.0.1", 0)) as silent:
            return roll.gather("mail", silent.getsockname()[:2])

    error = on_ranks(2, come, timeout_s=0.3)[0]
    assert isinstance(error, PeerFailureError)
    assert error.stall.phase == "connecting"
    deadline = time.monotonic() + LIMIT_S
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() == before


def test_of_several_peers_the_one_that_does_not_connect_is_named():
    def come(roll):
        if roll.rank < 2:
            return mail_of(roll)
        with (
            socket.create_server(("127.0.0.1", 0)) as silent,
            socket.create_connection(tuple(roll.gather("mail", silent.getsockname()[:2])[1])) as connection,
        ):
            connection.sendall(SECRET.encode() + bytes(7) + b"\x02")
            time.sleep(1.0)  # to rank 0 it never says a word
            return None

    fates = on_ranks(3, come, timeout_s=0.5)
    assert isinstance(fates[0], PeerFailureError)
    assert fates[0].peers == (2,)
    assert (fates[0].stall.expected, fates[0].stall.seen) == ("2 connections", "1")
    fates[1].close()


def test_a_peer_that_refuses_is_named_with_its_address():
    def come(roll):
        if roll.rank == 1:
            return mail_of(roll)
        with socket.create_server(("127.0.0.1", 0)) as left:
            address = left.getsockname()[:2]
        return roll.gather("mail", address)

    error = on_ranks(2, come)[1]
    assert isinstance(error, OSError)
    assert str(error).startswith("rank 0 at 127.0.0.1:")
    assert "refused" in str(error)


def test_whoever_connects_after_all_was_given_up_hangs_up(monkeypatch):
    connect, may_connect = socket.create_connection, threading.Event()

    def connect_late(*args, **kwargs):
        may_connect.wait(LIMIT_S)
        return connect(*args, **kwargs)

    monkeypatch.setattr("fusco.control.tcp_mesh.socket.create_connection", connect_late)

    def call(roll):
        def wait_in_vain(_, stall):
            raise PeerFailureError(
                rank=1, peers=(0,), operation="", stall=stall(), reason="nobody waits so long", has_left=False
            )

        try:
            return Mail(roll, [0], "127.0.0.1", SECRET, wait_in_vain)
        except PeerFailureError as error:
            may_connect.set()
            return error  # which remembers what there was

    def answer(roll):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.settimeout(LIMIT_S)
            roll.gather("mail", listener.getsockname()[:2])
            connection, _ = listener.accept()
            with connection:
                connection.settimeout(LIMIT_S / 4)
                while connection.recv(100):
                    pass
        return "hung up"

    fates = on_ranks(2, lambda roll: call(roll) if roll.rank else answer(roll))
    assert isinstance(fates[1], PeerFailureError)
    assert fates[0] == "hung up"


def test_nobody_waits_for_peers_to_connect_once_all_was_given_up():
    before = threading.active_count()

    def come(roll):
        def wait_in_vain(*_):
            time.sleep(0.2)  # until it waits for somebody to connect
            raise TransportError("nobody waits so long")

        if roll.rank == 0:
            return Mail(roll, [1], "127.0.0.1", SECRET, wait_in_vain)
        return roll.gather("mail", ("127.0.0.1", 9))

    assert isinstance(on_ranks(2, come)[0], TransportError)
    deadline = time.monotonic() + LIMIT_S / 2
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() <= before


@pytest.mark.parametrize("says", [b"", b"GET / HTTP/1.1\r\n\r\n", b"x" * 40, b"f" * 32 + bytes(7) + b"\x01"])
def test_strangers_are_turned_away(says):
    def talk(roll):
        gather = roll.gather

        def gather_after_a_stranger(stage, value):
            if roll.rank == 0:
                with socket.create_connection(tuple(value)) as stranger:
                    stranger.sendall(says)
            return gather(stage, value)

        roll.gather = gather_after_a_stranger
        mail = mail_of(roll)
        try:
            return exchange(mail, b"hello", [1 - roll.rank])
        finally:
            mail.close()

    assert on_ranks(2, talk) == {0: {1: b"hello"}, 1: {0: b"hello"}}


def test_strangers_that_stay_are_held_up_to_a_bound():
    num_strangers, hung_up = 400, []
    with ExitStack() as stack:

        def talk(roll):
            gather = roll.gather

            def gather_after_strangers(stage, value):
                if roll.rank == 0:
                    strangers.extend(
                        stack.enter_context(socket.create_connection(tuple(value))) for _ in range(num_strangers)
                    )
                return gather(stage, value)

            strangers = []
            roll.gather = gather_after_strangers
            if roll.rank == 1:
                roll.gather("mail", None)  # it connects once the others have been looked at
                return
            may_end = threading.Timer(1.0, lambda: None)
            may_end.start()

            def wait_until(is_ready, stall):
                may_end.join()
                for stranger in strangers:
                    stranger.setblocking(False)
                    try:
                        hung_up.append(stranger.recv(1))
                    except BlockingIOError:
                        pass
                raise TransportError("enough")

            with pytest.raises(TransportError, match="enough"):
                Mail(roll, [1], "127.0.0.1", SECRET, wait_until)
            return

        on_ranks(2, talk)
    assert hung_up == [b""] * (num_strangers - 256)


@pytest.mark.parametrize("says", [b"", SECRET.encode(), SECRET.encode() + bytes(6)])
def test_a_stranger_that_stays_and_says_no_more_holds_nobody_up(says):
    with ExitStack() as strangers:

        def talk(roll):
            gather = roll.gather

            def gather_after_a_stranger(stage, value):
                if roll.rank == 0:
                    stranger = strangers.enter_context(socket.create_connection(tuple(value)))
                    stranger.sendall(says)
                return gather(stage, value)

            roll.gather = gather_after_a_stranger
            with closing(mail_of(roll)) as mail:
                return exchange(mail, b"hello", [1 - roll.rank])

        assert on_ranks(2, talk, timeout_s=3.0) == {0: {1: b"hello"}, 1: {0: b"hello"}}
