"""The thread that releases a device calls back within 50 ms of a death or report, and some time after a departure."""

import socket
import threading
import time
from contextlib import ExitStack, closing
from dataclasses import replace

import pytest
from watched_ranks import Ranks

from fusco.control.status_server import FailureReport
from fusco.control.watchdog import PeerWatch, Watchdog
from played_network import PlayedNetwork

LIMIT_S = 0.05
TRIES = 3  # this machine may be loaded
SOON_S = 5.0


@pytest.fixture
def ranks():
    with ExitStack() as stack:
        yield Ranks(stack, num_others=2)


class Watched:
    """A watch of rank 0, and the time at which it released the device."""

    def __init__(self, ranks: Ranks) -> None:
        self.watchdog, self.released = ranks.watchdog(), threading.Event()
        self.released_at = 0.0
        self.watch = PeerWatch(self.watchdog, self._release)

    def _release(self) -> None:
        self.released_at = time.monotonic()
        self.released.set()

    def seconds_to_release(self, befall) -> float:
        """Start the watch and let something befall it."""
        with closing(self.watch):
            self.watch.start()
            self.watch.start()  # does nothing
            time.sleep(0.05)
            assert not self.released.is_set()
            began = time.monotonic()
            befall()
            assert self.released.wait(SOON_S)
        return self.released_at - began


def kill(ranks):
    ranks.processes[0].kill()


def report(ranks):
    ranks.others[0].report_failure({0: ranks.local.address}, FailureReport((2,), "dead", 1, has_left=True), SOON_S)


@pytest.mark.parametrize("befall", [kill, report])
def test_a_death_or_a_report_releases_the_device_within_50_ms(befall):
    for left in reversed(range(TRIES)):
        with ExitStack() as stack:
            ranks = Ranks(stack, num_others=2)
            took_s = Watched(ranks).seconds_to_release(lambda: befall(ranks))  # noqa: B023  called here
        if took_s < LIMIT_S:
            return
        assert left, took_s


def test_a_closed_connection_releases_the_device(ranks):
    ours, theirs = socket.socketpair()
    watched = Watched(ranks)
    watched.watchdog.watch_network(PlayedNetwork(), {2: ours.fileno()}, polls=False)
    assert watched.seconds_to_release(theirs.close) < SOON_S
    ours.close()


def test_the_dead_are_reported_to_the_others(ranks):
    watched = Watched(ranks)
    watched.seconds_to_release(lambda: ranks.kill(1))
    reason = f"rank 1 (pid {ranks.peers[1].pid}) is dead"
    assert ranks.others[1].failure_report == FailureReport((1,), reason, found_by=0, has_left=True)


def test_ranks_that_leave_one_after_the_other_complete_their_calls_first(ranks):
    watched = Watched(ranks)

    def leave():
        ranks.others[0].report_departure({0: ranks.local.address}, 1, "left its communicator", SOON_S)
        ranks.kill(1)  # its process ends

    assert 1.0 < watched.seconds_to_release(leave) < SOON_S


def test_without_a_capture_there_is_no_thread(ranks):
    before = threading.active_count()
    watched = Watched(ranks)
    assert threading.active_count() == before
    watched.watch.close()


def test_closing_ends_the_thread(ranks):
    watched = Watched(ranks)
    before = threading.active_count()
    watched.watch.start()
    watched.watch.close()
    assert threading.active_count() == before
    ranks.kill(1)
    assert not watched.released.wait(0.1)


def test_ranks_of_other_machines_are_told_of_a_closed_connection(ranks):
    for rank in ranks.peers:
        ranks.peers[rank] = replace(ranks.peers[rank], is_on_this_machine=False)
    ours, theirs = socket.socketpair()
    watched = Watched(ranks)
    watched.watchdog.watch_network(PlayedNetwork(), {1: ours.fileno()}, polls=False)
    watched.seconds_to_release(theirs.close)
    assert ranks.others[1].failure_report.reason == "rank 1 is dead or has left: its connection is closed"
    ours.close()


def test_a_rank_both_dead_and_disconnected_is_named_once(ranks):
    ours, theirs = socket.socketpair()
    watched = Watched(ranks)
    watched.watchdog.watch_network(PlayedNetwork(), {1: ours.fileno()}, polls=False)

    def end():
        ranks.kill(1)
        theirs.close()

    watched.seconds_to_release(end)
    reason = f"rank 1 (pid {ranks.peers[1].pid}) is dead"
    assert ranks.others[1].failure_report == FailureReport((1,), reason, found_by=0, has_left=True)
    ours.close()


def test_a_watch_that_fails_releases_the_device(ranks, monkeypatch):
    failures, watched = [], Watched(ranks)
    monkeypatch.setattr(threading, "excepthook", lambda failure: failures.append(failure.exc_value))

    def fail():
        monkeypatch.setattr(Watchdog, "has_departed_rank", property(lambda _: 1 // 0))

    assert watched.seconds_to_release(fail) < SOON_S
    assert [type(failure) for failure in failures] == [ZeroDivisionError]
