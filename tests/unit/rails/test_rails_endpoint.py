"""Endpoints: what they need, their peers' ends, and their own."""

import gc
import os
import selectors
import signal
import subprocess
import sys
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
            assert "rail 2 (lo, 127.0.0.3 to 127.0.0.3:" in str(failure.value)
        with pytest.raises(PeerFailureError):
            channel.isend(b"more")
        child.stdin.close()


def test_a_peer_that_does_not_take_part(tmp_path):
    with connected(tmp_path) as (a, b):
        with pytest.raises(PeerFailureError, match=r"isend #0.*worker 1 did not take part within 0.1 s; rail 0 \(lo"):
            a.isend(b"no receive is posted").wait(0.1)
        wait_for(lambda: a.is_closed)
        with pytest.raises(PeerFailureError):
            b.irecv(bytearray(100)).wait()


def test_after_a_limit_memory_is_the_callers_again(tmp_path):
    with connected(tmp_path) as (a, _):
        waiting = a.irecv(bytearray(4))
        with pytest.raises(PeerFailureError, match=r"irecv #0"):
            waiting.wait(0.1)
        assert waiting.done


def test_an_error_of_a_callback_is_not_that_of_a_rail(tmp_path):
    def fails(_):
        raise FileNotFoundError(2, "No such file")

    with connected(tmp_path) as (a, b):
        a.isend(b"one")
        b.irecv(bytearray(3), fails)
        with pytest.raises(RuntimeError, match=r"on_done of irecv #0 raised FileNotFoundError\(2, 'No such file'\)"):
            b.irecv(bytearray(3)).wait()
        with pytest.raises(PeerFailureError, match="worker 1 has closed its channel"):
            a.irecv(bytearray(3)).wait()


def test_an_event_loop_polls_when_a_descriptor_is_readable(tmp_path):
    """Without a thread, and without polling while nothing happens."""
    options, num_polls, done = {"rails": RAILS[:1], "limits": LIMITS, "is_polled": True}, 0, []
    with (
        Endpoint(worker=0, board=tmp_path / "a", **options) as a,
        Endpoint(worker=0, board=tmp_path / "b", **options) as b,
        selectors.DefaultSelector() as selector,
    ):
        for each in (a, b):
            selector.register(each.fileno(), selectors.EVENT_READ)
        channel, buffer = a.dial(b.listen(), bytes(16)), bytearray(1_000_000)
        channel.isend(message := random_bytes(1_000_000))
        begin, accepted = time.monotonic(), None
        while not done:
            selector.select(min(a.poll(), b.poll()))
            num_polls += 1
            if accepted is None and (accepted := b.channel(bytes(16))):
                accepted.irecv(buffer, done.append)
            assert time.monotonic() < begin + 10.0
        assert done == [None]
        assert buffer == message.tobytes()
        settled, num_polls = num_polls, 0
        while time.monotonic() < begin + 1.0:
            selector.select(min(a.poll(), b.poll()))
            num_polls += 1
        assert settled < 1000
        assert num_polls < 30  # looks at links and at the board


def test_closing_fails_what_is_not_done(tmp_path):
    with connected(tmp_path) as (a, b):
        waiting, peers = a.irecv(bytearray(4)), b.irecv(bytearray(4))
        a.close()
        a.close()
        with pytest.raises(ClosedError, match="the channel was closed"):
            waiting.wait()
        for post in (a.isend, a.irecv):
            with pytest.raises(ClosedError, match="the channel was closed"):
                post(bytearray(1))
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
    for num in range(4):  # one for the board, a socket, two of the loop
        with (
            descriptors_left(num),
            pytest.raises(
                FuscoError, match=r"(board of rails|worker 0 cannot use rails).*: Too many open files; "
            ) as error,
        ):
            Endpoint(worker=0, rails=RAILS, board=tmp_path / "a")
        assert error.tb is not None  # which refers to the endpoint
        assert len(os.listdir("/proc/self/fd")) == before, num
        assert not (tmp_path / "a").exists(), num


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


def test_after_the_endpoint_was_closed(tmp_path):
    with connected(tmp_path) as (a, b):
        waiting = a.irecv(bytearray(4))
        a._endpoint.close()
        for failing in (waiting.wait, lambda: a.isend(b"x"), lambda: a.irecv(bytearray(1))):
            with pytest.raises(ClosedError, match="the channel was closed"):
                failing()
        with pytest.raises(PeerFailureError, match="worker 0 has closed its channel"):
            b.irecv(bytearray(1)).wait()


def test_channels_that_were_closed_leave_nothing(tmp_path):
    with (
        Endpoint(worker=0, rails=RAILS, board=tmp_path / "a") as a,
        Endpoint(worker=1, rails=RAILS, board=tmp_path / "b") as b,
    ):
        address = b.listen()
        for i in range(20):
            near, far = a.connect(address), b.accept()
            near.isend(b"hello", lambda _: None)
            assert far.irecv(bytearray(5)).wait() == 5
            (near if i % 2 else far).close()
            wait_for(lambda far=far, near=near: far.is_closed and near.is_closed)
        before = len(os.listdir("/proc/self/fd"))
        del near, far
        gc.collect()
        assert len(a._channels) + len(b._channels) <= 2
        assert len(os.listdir("/proc/self/fd")) <= before


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
