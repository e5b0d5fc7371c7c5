"""Which peers are gone: killed, ended and reaped processes, and closed connections; not those that are stopped."""

import os
import select
import signal
import socket
import subprocess
import sys
import time
from contextlib import closing
from types import SimpleNamespace

import pytest

from fusco.control.liveness import Liveness
from fusco.core.errors import TransportError

SOON_S = 2.0  # for a loaded machine


@pytest.fixture
def process():
    with subprocess.Popen([sys.executable, "-Sc", "import time; time.sleep(600)"]) as process:
        yield process
        process.kill()


def is_soon(condition) -> bool:
    """Whether a condition holds within two seconds."""
    deadline = time.monotonic() + SOON_S
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.001)
    return condition()


def test_a_killed_process_is_dead_before_and_after_it_is_reaped(process):
    with closing(Liveness({3: process.pid})) as liveness:
        assert not liveness.is_dead(3)
        process.kill()
        assert is_soon(lambda: liveness.is_dead(3))
        assert process.returncode is None
        process.wait()
        assert liveness.is_dead(3)


def test_a_stopped_process_is_alive(process):
    with closing(Liveness({3: process.pid})) as liveness:
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        assert not liveness.is_dead(3)


def test_a_process_that_ended_before_it_was_watched_is_dead(process):
    process.kill()
    process.wait()
    with closing(Liveness({3: process.pid})) as liveness:
        assert liveness.is_dead(3)


def test_a_rank_of_another_machine_is_alive(process):
    with closing(Liveness({3: process.pid})) as liveness:
        process.kill()
        assert not liveness.is_dead(4)


def test_a_process_that_cannot_be_watched_is_an_error(process, monkeypatch):
    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(TransportError, match=f"process {process.pid} .* cannot be watched: Permission denied"):
        Liveness({3: process.pid})


def test_closed_connections_are_seen_though_bytes_are_unread():
    pairs = {rank: socket.socketpair() for rank in (4, 5)}
    liveness = Liveness({})
    assert liveness.disconnected() == ()
    liveness.add_connections({rank: ours.fileno() for rank, (ours, _) in pairs.items()})
    for _, theirs in pairs.values():
        theirs.send(b"a record that is not read yet")
    assert liveness.disconnected() == ()
    pairs[5][1].close()
    assert liveness.disconnected() == (5,)
    assert pairs[5][0].recv(8) == b"a record"
    liveness.close()
    assert liveness.disconnected() == ()
    for ours, theirs in pairs.values():
        ours.close(), theirs.close()


@pytest.mark.parametrize("reused", [b"", b"0 "])
def test_a_process_is_not_dead_because_watching_ended_meanwhile(process, monkeypatch, reused):
    liveness, pread = Liveness({3: process.pid}), os.pread

    def close_and_read(*args):
        liveness.close()
        return reused or pread(*args)  # the descriptor is another file's by now, or closed

    monkeypatch.setattr(os, "pread", close_and_read)
    assert not liveness.is_dead(3)


def test_a_connection_is_not_closed_because_watching_ended_meanwhile(monkeypatch):
    ours, theirs = socket.socketpair()
    liveness, poll = Liveness({}), select.poll()
    liveness.add_connections({1: ours.fileno()})

    def close_and_poll(timeout):
        liveness.close(), ours.close()
        return poll.poll(timeout)

    monkeypatch.setattr(select, "poll", lambda: SimpleNamespace(register=poll.register, poll=close_and_poll))
    assert liveness.disconnected() == ()
    theirs.close()


def test_no_descriptor_is_left(process):
    before = os.listdir("/proc/self/fd")
    liveness = Liveness({3: process.pid})
    assert len(os.listdir("/proc/self/fd")) == len(before) + 1
    liveness.close()
    assert os.listdir("/proc/self/fd") == before


def test_no_descriptor_is_left_if_a_process_cannot_be_watched(process, monkeypatch):
    open_file, opened = os.open, []

    def refuse_the_second(*args):
        if opened:
            raise OSError(24, "Too many open files")
        opened.append(open_file(*args))
        return opened[0]

    before = os.listdir("/proc/self/fd")
    monkeypatch.setattr(os, "open", refuse_the_second)
    with pytest.raises(TransportError, match="Too many open files"):
        Liveness({3: process.pid, 4: process.pid})
    assert opened
    assert os.listdir("/proc/self/fd") == before
