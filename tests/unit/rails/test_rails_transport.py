"""Endpoints over loopback addresses: messages, failures of rails and peers, foreign connections."""

import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress

import numpy as np
import pytest
import torch
from plugin_rig import descriptors_left

from fusco.core.errors import ClosedError, FuscoError, PeerFailureError, TransportError
from fusco.rails import Address, Endpoint, Limits, Rail
from fusco.rails.connection import Connection
from fusco.rails.handshake import Handshake, Introduction
from fusco.rails.wire import DATA, Record, WireError, pack

RAILS = [Rail("lo", f"127.0.0.{i + 1}", (i,)) for i in range(3)]
LIMITS = Limits(chunk_bytes=64 * 1024, no_rail_s=1.5)
SEED = np.random.default_rng(0)


@contextmanager
def connected(tmp_path, policy="fuselink", **options):
    """Two endpoints, as if on two hosts, and the channel's two ends."""
    options = {"limits": LIMITS, "timeout_s": 20.0, **options}
    with (
        Endpoint(worker=0, rails=RAILS, policy=policy, board=tmp_path / "a", **options) as a,
        Endpoint(worker=1, rails=RAILS, policy=policy, board=tmp_path / "b", **options) as b,
    ):
        channel = a.connect(b.listen())
        yield channel, b.accept()


def random_bytes(size):
    return SEED.integers(0, 256, size, dtype=np.uint8)


def wait_for(condition, limit_s=5.0):
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, "timed out"
        time.sleep(0.005)


def cut(channel, rail):
    """Let a rail of a channel fail, as a reset by the network does."""

    def drop():
        if rail in channel._connections:  # unless it has just failed at the other end
            channel.drop(channel._connections[rail], "cut", tells_peer=False)

    channel._host.loop.post(drop)


@pytest.mark.parametrize("policy", ["fuselink", "fuselink-paper", "spray", "direct"])
def test_messages_in_both_directions(tmp_path, policy):
    sizes = [0, 1, 65536, 65537, 1_000_000, 3]
    with connected(tmp_path, policy) as ends:
        messages = [[random_bytes(size) for size in sizes] for _ in ends]
        buffers = [[bytearray(size + 5) for size in sizes] for _ in ends]
        receives = [[end.irecv(buffer) for buffer in each] for end, each in zip(ends, buffers, strict=True)]
        sends = [[end.isend(message) for message in each] for end, each in zip(ends, messages, strict=True)]
        for i in (0, 1):
            assert [each.wait() for each in receives[i]] == sizes
            assert [each.wait() for each in sends[i]] == sizes
            received = [bytes(buffer[:-5]) for buffer in buffers[i]]
            assert received == [message.tobytes() for message in messages[1 - i]]
        assert (ends[0].peer, ends[1].peer) == (1, 0)


def test_tensors_are_sent_from_and_received_into_their_memory(tmp_path):
    with connected(tmp_path) as (a, b):
        for tensor in (torch.randn(300, 77).bfloat16(), torch.arange(10), torch.tensor(2.5), torch.empty(0, 4)):
            out = torch.empty_like(tensor)
            received = b.irecv(out)
            a.isend(tensor).wait()
            assert received.wait() == tensor.nbytes
            assert torch.equal(out, tensor)


@pytest.mark.parametrize(
    ("buffer", "error", "text"),
    [
        ("text", TypeError, "a buffer or a tensor is needed, got str"),
        (b"read-only", ValueError, "must be writable"),
        (np.zeros((4, 4))[:, 1], ValueError, "must be contiguous"),
        (torch.zeros(4, 4)[:, 1], ValueError, "a tensor must be contiguous, got strides"),
        (torch.zeros(2).to_sparse(), TypeError, "must be a dense tensor"),
        (torch.zeros(2, device="meta"), ValueError, "must be on the CPU, got one on meta"),
    ],
)
def test_buffers_that_cannot_be_received_into(tmp_path, buffer, error, text):
    with connected(tmp_path) as (a, _), pytest.raises(error, match=text):
        a.irecv(buffer)


def test_a_message_larger_than_its_receive(tmp_path):
    with connected(tmp_path) as (a, b):
        sends, receives = [a.isend(bytes(100)), a.isend(b"next")], [b.irecv(bytearray(99)), b.irecv(bytearray(4))]
        for each in (sends[0], receives[0]):
            with pytest.raises(ValueError, match="100"):
                each.wait()
        assert (sends[1].wait(), receives[1].wait()) == (4, 4)


def test_threads_may_post_at_the_same_time(tmp_path):
    with connected(tmp_path) as (a, b):
        sent, buffers = [], [bytearray(4) for _ in range(400)]
        receives = [b.irecv(buffer) for buffer in buffers]

        def send(base):
            sent.extend(a.isend((base + i).to_bytes(4, "little")) for i in range(100))

        threads = [threading.Thread(target=send, args=(1000 * k,)) for k in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for each in (*sent, *receives):
            each.wait()
        numbers = [int.from_bytes(buffer, "little") for buffer in buffers]
        assert sorted(numbers) == sorted(1000 * k + i for k in range(4) for i in range(100))
        for k in range(4):
            assert [number for number in numbers if number // 1000 == k] == [1000 * k + i for i in range(100)]


def test_many_channels_of_one_endpoint(tmp_path):
    with Endpoint(worker=0, rails=RAILS, board=tmp_path / "a", limits=LIMITS) as hub:
        leaves = [Endpoint(worker=i % 3, rails=RAILS, board=tmp_path / "b", limits=LIMITS) for i in range(5)]
        address = hub.listen()
        ends = [(leaf.connect(address), hub.accept()) for leaf in leaves]
        messages = [random_bytes(500_000 + i) for i in range(5)]
        buffers = [bytearray(600_000) for _ in ends]
        receives = [end[1].irecv(buffer) for end, buffer in zip(ends, buffers, strict=True)]
        sends = [end[0].isend(message) for end, message in zip(ends, messages, strict=True)]
        for send, receive, buffer, message in zip(sends, receives, buffers, messages, strict=True):
            send.wait()
            assert buffer[: receive.wait()] == message.tobytes()
        for leaf in leaves:
            leaf.close()


def test_rails_fail_under_load_and_come_back(tmp_path):
    message, rng = random_bytes(4_000_000), np.random.default_rng(1)
    with connected(tmp_path) as ends:
        for repetition in range(12):
            buffers = [bytearray(len(message)) for _ in range(4)]
            receives = [ends[1].irecv(buffer) for buffer in buffers]
            sends = [ends[0].isend(message) for _ in buffers]
            for _ in range(2):
                time.sleep(0.002)
                end = ends[int(rng.integers(2))]
                if len(end.rails) > 1:
                    cut(end, end.rails[int(rng.integers(len(end.rails)))])
            for each in (*sends, *receives):
                assert each.wait() == len(message)
            assert all(buffer == message.tobytes() for buffer in buffers), repetition
        wait_for(lambda: all(end.rails == (0, 1, 2) for end in ends))


def test_all_rails_but_one_fail(tmp_path):
    message = random_bytes(3_000_000)
    with connected(tmp_path) as (a, b):
        buffer = bytearray(len(message))
        received, sent = b.irecv(buffer), a.isend(message)
        for rail in (0, 1):
            cut(a, rail)
        assert (sent.wait(), received.wait()) == (len(message), len(message))
        assert buffer == message.tobytes()


CHILD = """
import sys
from pathlib import Path
from fusco.rails import Endpoint, Limits, Rail
rails = [Rail("lo", f"127.0.0.{i + 1}", (i,)) for i in range(3)]
with Endpoint(worker=1, rails=rails, board=Path(sys.argv[1]), limits=Limits(no_rail_s=1.5)) as endpoint:
    sys.stdout.write(endpoint.listen().to_bytes().decode() + "\\n")
    sys.stdout.flush()
    channel = endpoint.accept()
    channel.isend(b"here").wait()
    if sys.argv[2] == "closes":
        sys.stdin.readline()
    else:
        sys.stdin.read()
"""


@pytest.mark.parametrize(("end", "text"), [("closes", "has closed its channel"), ("dies", "is unreachable")])
def test_a_peer_that_leaves(tmp_path, end, text):
    arguments, pipe = [sys.executable, "-c", CHILD, tmp_path / "b", end], subprocess.PIPE
    with (
        subprocess.Popen(arguments, stdin=pipe, stdout=pipe) as child,
        Endpoint(worker=0, rails=RAILS, board=tmp_path / "a", limits=LIMITS) as endpoint,
    ):
        channel = endpoint.connect(Address.from_bytes(child.stdout.readline()))
        assert channel.irecv(bytearray(4)).wait() == 4
        waiting = channel.irecv(bytearray(4))
        if end == "closes":
            child.stdin.write(b"\n")
            child.stdin.flush()
        else:
            child.send_signal(signal.SIGKILL)
        begin = time.monotonic()
        with pytest.raises(PeerFailureError, match=text) as failure:
            waiting.wait()
        assert time.monotonic() - begin < 5.0
        assert failure.value.peers == (1,)
        if end == "dies":
            assert "rail 2 (lo, 127.0.0.3)" in str(failure.value)
        with pytest.raises(PeerFailureError):
            channel.isend(b"more")
        child.stdin.close()


def test_a_peer_that_does_not_take_part(tmp_path):
    with connected(tmp_path) as (a, b):
        with pytest.raises(PeerFailureError, match=r"isend #0.*worker 1 did not take part within 0.1 s; rail 0 \(lo"):
            a.isend(b"no receive is posted").wait(0.1)
        assert a.closed.wait(5.0)
        with pytest.raises(PeerFailureError):
            b.irecv(bytearray(100)).wait()


def test_what_a_peer_acknowledged_before_it_reset_the_connection_was_delivered(tmp_path):
    """It leaves with bytes unread, so its end resets the connection, which the other end notices when it writes."""
    options = {"rails": RAILS[:1], "limits": LIMITS, "is_polled": True}
    with (
        Endpoint(worker=0, board=tmp_path / "a", **options) as a,
        Endpoint(worker=0, board=tmp_path / "b", **options) as b,
    ):
        ours, theirs = a.dial(b.listen(), bytes(16)), None
        while not (ours.rails and theirs and theirs.rails):
            a.poll()
            b.poll()
            theirs = b.channel(bytes(16))
        sent, received = ours.isend(b"all"), theirs.irecv(bytearray(3))
        while not received.done:
            a.poll()
            b.poll()
        ours.irecv(bytearray(3))  # tells the peer, which does not read it
        theirs._connections[0].socket.close()
        ours.irecv(bytearray(3))
        assert not ours.rails
        assert sent.done
        assert sent.wait() == 3


def test_closing_fails_what_is_not_done(tmp_path):
    with connected(tmp_path) as (a, b):
        waiting, peers = a.irecv(bytearray(4)), b.irecv(bytearray(4))
        a.close()
        a.close()
        with pytest.raises(ClosedError, match="the channel was closed"):
            waiting.wait()
        with pytest.raises(ClosedError):
            a.isend(b"")
        with pytest.raises(PeerFailureError, match="worker 0 has closed its channel"):
            peers.wait()


def test_without_a_listener(tmp_path):
    with Endpoint(worker=1, rails=RAILS, board=tmp_path / "b") as gone:
        address = gone.listen()
    with (
        Endpoint(worker=0, rails=RAILS, board=tmp_path / "a", limits=LIMITS) as endpoint,
        pytest.raises(PeerFailureError, match="Connection refused"),
    ):
        endpoint.connect(address, timeout_s=5.0)


def test_without_a_client(tmp_path):
    with Endpoint(worker=0, rails=RAILS, board=tmp_path / "a") as endpoint:
        endpoint.listen()
        with pytest.raises(TransportError, match=r"worker 0: no peer has connected within 0.05 s"):
            endpoint.accept(0.05)
    with pytest.raises(ClosedError, match="the endpoint of worker 0 was closed"):
        endpoint.listen()


def test_a_worker_without_a_rail(tmp_path):
    with pytest.raises(ValueError, match=r"worker 7 owns none of the rails; their owners are lo: \(0,\), lo"):
        Endpoint(worker=7, rails=RAILS, board=tmp_path / "a")
    assert not (tmp_path / "a").exists()


@pytest.fixture
def no_garbage_collection():
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_garbage_collection")
def test_without_descriptors_an_endpoint_says_so_and_leaves_nothing(tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    for num in range(5):  # two for the board, a socket, two of the loop
        with (
            descriptors_left(num),
            pytest.raises(
                FuscoError, match=r"(board of rails|worker 0 cannot use rails).*: Too many open files; "
            ) as error,
        ):
            Endpoint(worker=0, rails=RAILS, board=tmp_path / "a")
        assert error.tb is not None  # which refers to the endpoint
        assert len(os.listdir("/proc/self/fd")) == before, num
        assert (tmp_path / "a").exists() == (num == 1), num  # an empty board, which its next user removes


@pytest.mark.usefixtures("no_garbage_collection")
def test_without_threads_an_endpoint_says_so_and_leaves_nothing(tmp_path, monkeypatch):
    def refuse(_):
        raise RuntimeError("can't start new thread")

    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(TransportError, match=r"worker 0 cannot use rails: can't start new thread") as error:
        Endpoint(worker=0, rails=RAILS, board=tmp_path / "a")
    assert error.tb is not None  # which refers to the endpoint
    assert len(os.listdir("/proc/self/fd")) == before
    assert not (tmp_path / "a").exists()


def test_rails_are_connected_once_there_are_descriptors_again(tmp_path):
    with (
        Endpoint(worker=0, rails=RAILS, board=tmp_path / "a") as a,
        Endpoint(worker=1, rails=RAILS, board=tmp_path / "b") as b,
    ):
        address = b.listen()
        with descriptors_left(0):
            channel = a.dial(address, bytes(16))
            time.sleep(0.2)
            assert not channel.rails
        wait_for(lambda: len(channel.rails) == len(RAILS))


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
        this = Introduction(1, num_rails, 4096, b"c" * 16, claimed, 1)
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


def test_a_forked_process_must_not_use_a_channel(tmp_path):
    with connected(tmp_path) as (a, _):
        pid = os.fork()
        if not pid:
            try:
                a.isend(b"")
            except ClosedError:
                os._exit(7)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7


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


def test_a_late_chunk_arrives_over_another_rail(tmp_path):
    message = random_bytes(3_000_000)
    with connected(tmp_path, limits=Limits(chunk_bytes=64 * 1024, hold_s=0.02, release_s=0.001)) as (a, b):
        stuck = a._connections[1]
        stuck.write = lambda: None  # what is given to it stays there, as in a class that never gets its turn
        buffer = bytearray(len(message))
        received, sent = b.irecv(buffer), a.isend(message)
        assert (sent.wait(), received.wait()) == (len(message), len(message))
        assert buffer == message.tobytes()
        assert stuck.outstanding
