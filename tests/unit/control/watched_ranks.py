"""Ranks that a watchdog watches, and a clock that only sleeping advances."""

import itertools
import socket
import subprocess
import sys
import time
from contextlib import closing
from unittest import mock

import pytest

from fusco.control.fault_finder import Peer
from fusco.control.status_server import StatusServer
from fusco.control.watchdog import Watchdog
from fusco.core.errors import PeerFailureError, Stall

HOST = "127.0.0.1"
TIMEOUT_S = 4.0
SLACK_S = 1.0  # more than a loaded machine takes to schedule all processes
AT_ONCE_S = 2.0
STALL = Stall("adding partial sums", (1,), "4 chunks", "3")
LOCAL_DEVICE = Stall("waiting for the local device", (), "the plan", "none", is_for_local_device=True)


class Ranks:
    """Rank 0, which has the watchdog, and others: a status server in this process and an idle process each."""

    def __init__(self, stack, num_others):
        self.local, *self.others = (
            stack.enter_context(closing(StatusServer("secret", HOST))) for _ in range(num_others + 1)
        )
        command = [sys.executable, "-Sc", "import time; time.sleep(600)"]
        self.processes = [stack.enter_context(subprocess.Popen(command)) for _ in self.others]
        stack.callback(lambda: [process.kill() for process in self.processes])
        self.peers = {
            rank: Peer(status_server.address, process.pid, is_on_this_machine=True)
            for rank, status_server, process in zip(itertools.count(1), self.others, self.processes, strict=False)
        }
        for status_server in self.others:
            status_server.note(5, "combine #5", "start")
        self._stack = stack

    def watchdog(self, timeout_s=TIMEOUT_S, spin_s=0.0):
        """Return the watchdog of rank 0, in the same collective as the others."""
        watchdog = self._stack.enter_context(closing(Watchdog(0, self.peers, self.local, timeout_s, spin_s)))
        watchdog.begin(5, "combine #5")
        return watchdog

    def kill(self, rank):
        self.processes[rank - 1].kill()
        self.processes[rank - 1].wait()

    def deafen(self, rank):
        """Let a rank accept connections, as the kernel does for a stopped process, but never answer."""
        server = self._stack.enter_context(socket.create_server((HOST, 0)))
        self._move(rank, (HOST, server.getsockname()[1]))

    def leave(self, rank):
        """Let a rank close its communicator while its process stays alive."""
        with closing(StatusServer("secret", HOST)) as gone:
            self._move(rank, gone.address)

    def _move(self, rank, address):
        self.peers[rank] = Peer(address, self.processes[rank - 1].pid, is_on_this_machine=True)


class SleepClock:
    """A clock that only sleeping advances, so that limits take no time and do not depend on the load."""

    def __init__(self):
        self.now_s = self.slept_s = 0.0
        self._began = time.monotonic()

    def monotonic(self):
        return self._began + self.now_s

    def sleep(self, seconds):
        self.slept_s += seconds
        self.now_s += seconds


def failure_of(watchdog, stall=STALL):
    """Return the error of a wait that times out, and how many seconds it slept, by the clock, and worked."""
    clock, began = SleepClock(), time.monotonic()
    with mock.patch("fusco.control.watchdog.time", clock), pytest.raises(PeerFailureError) as caught:
        watchdog.wait_until(lambda: False, lambda: stall)
    return caught.value, clock.slept_s + time.monotonic() - began


def leaves(ranks):
    ranks.local.departures[1] = "left"
