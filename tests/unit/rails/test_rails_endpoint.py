"""Endpoints: what they need, their peers' ends, and their own."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from plugin_rig import descriptors_left
from rails_ends import LIMITS, RAILS, connected, random_bytes, wait_for

from fusco.core.errors import ClosedError, FuscoError, PeerFailureError, TransportError
from fusco.rails import Address, Endpoint


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


def test_after_a_limit_memory_is_the_callers_again(tmp_path):
    with connected(tmp_path) as (a, _):
        waiting = a.irecv(bytearray(4))
        a._host.loop.post(lambda: time.sleep(0.3))
        with pytest.raises(PeerFailureError, match=r"irecv #0"):
            waiting.wait(0.1)
        assert waiting.done


def test_an_error_of_a_callback_is_not_that_of_a_rail(tmp_path):
    def fails(_):
        raise FileNotFoundError(2, "No such file")

    with connected(tmp_path) as (a, b):
        sent = [a.isend(b"one"), a.isend(b"two")]
        b.irecv(bytearray(3), fails)
        with pytest.raises(RuntimeError, match=r"on_done of irecv #0 raised FileNotFoundError\(2, 'No such file'\)"):
            b.irecv(bytearray(3)).wait()
        with pytest.raises(PeerFailureError):
            sent[1].wait()


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
