"""A watchdog times out within its limit, and blames ranks that are dead, silent, late, or waited for, in that order."""

import itertools
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, closing
from dataclasses import replace
from unittest import mock

import pytest

from fusco.control.status_server import FailureReport, StatusServer, Unasked
from fusco.control.watchdog import Peer, Watchdog
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


@pytest.fixture
def ranks():
    with ExitStack() as stack:
        yield Ranks(stack, num_others=3)


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


@pytest.fixture
def clock(monkeypatch):
    """The clock of all watchdogs in a test."""
    clock = SleepClock()
    monkeypatch.setattr("fusco.control.watchdog.time", clock)
    return clock


def failure_of(watchdog, stall=STALL):
    """Return the error of a wait that times out, and how many seconds it slept, by the clock, and worked."""
    clock, began = SleepClock(), time.monotonic()
    with mock.patch("fusco.control.watchdog.time", clock), pytest.raises(PeerFailureError) as caught:
        watchdog.wait_until(lambda: False, lambda: stall)
    return caught.value, clock.slept_s + time.monotonic() - began


def test_a_wait_spins_at_first_where_it_may(ranks, clock, monkeypatch):
    watchdog, num_yields = ranks.watchdog(spin_s=0.1), 0

    def sched_yield():
        nonlocal num_yields
        num_yields += 1
        clock.now_s += 0.001

    monkeypatch.setattr("fusco.control.watchdog.os.sched_yield", sched_yield)
    watchdog.wait_until(lambda: clock.now_s > 0.05, lambda: STALL)
    assert (num_yields > 0, clock.slept_s) == (True, 0.0)
    until = clock.now_s + 0.15
    watchdog.wait_until(lambda: clock.now_s > until, lambda: STALL)
    assert clock.slept_s > 0


def test_messages_are_progressed_in_every_wait_and_restart_its_limit(ranks, clock):
    watchdog, num_polls = ranks.watchdog(timeout_s=0.4), 0

    def poll():
        nonlocal num_polls
        num_polls += 1
        clock.sleep(0.01)
        return True

    watchdog.add_poll(poll)
    watchdog.wait_until(lambda: clock.slept_s > 1.0, lambda: STALL)
    assert num_polls > 10


def test_a_death_is_noticed_while_spinning(ranks):
    watchdog = ranks.watchdog(spin_s=10 * TIMEOUT_S)
    ranks.kill(1)
    began = time.monotonic()
    with pytest.raises(PeerFailureError) as caught:
        watchdog.wait_until(lambda: False, lambda: STALL)
    assert caught.value.peers == (1,)
    assert time.monotonic() - began < AT_ONCE_S


def test_what_is_ready_needs_no_reason(ranks):
    answers = iter([False, False, True])
    ranks.watchdog().wait_until(lambda: next(answers), pytest.fail)


def test_the_error_names_rank_collective_phase_expected_and_seen(ranks):
    error, seconds = failure_of(ranks.watchdog())
    assert str(error).startswith(
        "rank 0 gave up in combine #5, phase 'adding partial sums', waiting for rank(s) 1: "
        "expected 4 chunks, saw 3. Cause: no progress for "
    )
    assert (error.rank, error.operation, error.stall, error.has_left) == (0, "combine #5", STALL, False)
    assert 0.7 * TIMEOUT_S < seconds < TIMEOUT_S + SLACK_S


def test_ranks_waited_for_are_blamed_if_none_is_late(ranks):
    ranks.others[0].note(5, "combine #5", "producing sums")
    error, _ = failure_of(ranks.watchdog())
    assert error.peers == (1,)
    assert "rank 1 is in combine #5, phase 'producing sums', for " in error.reason


def test_ranks_at_fault_are_named_once_and_in_order(ranks):
    stall = Stall("reuse of shared memory", (3, 0, 1, 3), "the previous call's end", "none")
    assert failure_of(ranks.watchdog(), stall)[0].peers == (1, 3)


def test_a_rank_that_waits_for_its_local_device_blames_no_rank(ranks):
    error, _ = failure_of(ranks.watchdog(), LOCAL_DEVICE)
    assert (error.peers, error.has_left) == ((), False)
    assert "phase 'waiting for the local device', waiting for no other rank: expected the plan, saw none. " in str(
        error
    )
    assert error.reason.endswith(
        " s; rank 0, in phase 'waiting for the local device', waits for no other rank, and all of them are alive"
    )
    assert {other.failure_report for other in ranks.others} == {
        FailureReport((), error.reason, found_by=0, has_left=False)
    }


def test_a_rank_that_waits_for_its_local_device_notices_any_dead_rank_at_once(ranks):
    watchdog = ranks.watchdog()
    ranks.kill(3)
    error, seconds = failure_of(watchdog, LOCAL_DEVICE)
    assert (error.peers, error.has_left) == ((3,), True)
    assert seconds < AT_ONCE_S


def test_a_late_rank_is_blamed_rather_than_those_that_wait_for_it(ranks):
    ranks.others[2].note(4, "dispatch #4", "")
    error, _ = failure_of(ranks.watchdog())
    assert error.peers == (3,)
    assert "rank 3 has been outside any fusco call for " in error.reason
    assert "(last call: dispatch #4)" in error.reason


def test_a_silent_rank_is_blamed_rather_than_a_late_one(ranks):
    ranks.others[2].note(4, "dispatch #4", "")
    ranks.deafen(2)
    error, seconds = failure_of(ranks.watchdog())
    assert error.peers == (2,)
    assert "rank 2 does not answer" in error.reason
    assert seconds < TIMEOUT_S + SLACK_S


def test_a_dead_rank_that_is_waited_for_is_noticed_at_once(ranks):
    watchdog = ranks.watchdog()
    ranks.kill(1)
    error, seconds = failure_of(watchdog)
    assert error.peers == (1,)
    assert error.has_left
    assert error.reason == f"rank 1 (pid {ranks.peers[1].pid}) is dead"
    assert seconds < AT_ONCE_S


def test_all_dead_ranks_are_named(ranks):
    watchdog = ranks.watchdog()
    ranks.kill(1)
    ranks.kill(3)
    assert failure_of(watchdog)[0].peers == (1, 3)


def test_a_rank_that_died_before_it_was_watched_is_dead(ranks):
    ranks.kill(1)
    error, seconds = failure_of(ranks.watchdog())
    assert error.peers == (1,)
    assert seconds < AT_ONCE_S


def test_a_dead_rank_that_no_rank_waits_for_is_blamed_after_the_limit(ranks):
    watchdog = ranks.watchdog()
    ranks.kill(3)
    assert failure_of(watchdog)[0].peers == (3,)


def test_all_ranks_are_asked_at_once_after_a_network_failure(ranks):
    ranks.leave(2)
    watchdog = ranks.watchdog()
    watchdog.add_network_probe(str)  # another network, which works
    watchdog.add_network_probe(lambda: "the network failed to send (rank 2)")
    error, seconds = failure_of(watchdog)
    assert error.peers == (2,)
    assert error.reason.startswith("the network failed to send (rank 2); rank 2 is dead or has left")
    assert seconds < AT_ONCE_S


def test_all_ranks_receive_the_failure_report_including_the_one_at_fault(ranks):
    ranks.others[2].note(4, "dispatch #4", "")
    error, _ = failure_of(ranks.watchdog())
    assert {other.failure_report for other in ranks.others} == {
        FailureReport((3,), error.reason, found_by=0, has_left=False)
    }


def test_a_failure_report_of_another_rank_is_raised(ranks):
    watchdog = ranks.watchdog()
    ranks.local.failure_report = FailureReport((3,), "rank 3 is dead", found_by=2, has_left=True)
    error, seconds = failure_of(watchdog)
    assert (error.peers, error.has_left) == ((3,), True)
    assert error.reason == "rank 3 is dead (found by rank 2)"
    assert seconds < AT_ONCE_S


def test_a_failure_report_that_comes_during_the_search_precedes_this_ranks_finding(ranks):
    ranks.deafen(1)
    watchdog = ranks.watchdog()
    report = FailureReport((2,), "rank 2 is dead", found_by=3, has_left=True)
    watchdog.add_network_probe(lambda: setattr(ranks.local, "failure_report", report) or "the network failed")
    assert failure_of(watchdog)[0].peers == (2,)


def test_giving_up_is_reported_to_all_others(ranks):
    ranks.watchdog().give_up("left its communicator")
    assert {other.failure_report for other in ranks.others} == {
        FailureReport((0,), "left its communicator", 0, has_left=True)
    }


def test_progress_restarts_the_limit(ranks, clock):
    watchdog = ranks.watchdog(timeout_s=1.5)
    while clock.slept_s < 2:
        watchdog.pause(lambda: STALL)
        watchdog.progress()


def test_a_wait_has_the_whole_limit_however_long_ago_something_moved(ranks, clock):
    watchdog = ranks.watchdog(timeout_s=1.5)
    clock.sleep(1.5)
    watchdog.wait_until(lambda: clock.slept_s > 2.0, lambda: STALL)


def test_asking_all_ranks_raises_only_if_one_is_dead(ranks):
    watchdog = ranks.watchdog()
    assert set(watchdog.query_all_ranks(STALL, "no connection")) == {1, 2, 3}
    ranks.kill(2)
    with pytest.raises(PeerFailureError, match=r"no connection; rank 2 .* is dead"):
        watchdog.query_all_ranks(STALL, "no connection")


def test_a_rank_that_has_left_is_named_at_once_by_ranks_that_wait_for_it(ranks):
    watchdog = ranks.watchdog()
    ranks.local.departures[1] = "left, as its communicator was never closed"
    error, seconds = failure_of(watchdog)
    assert (error.peers, error.has_left) == ((1,), True)
    assert error.reason == "rank 1 left, as its communicator was never closed"
    assert seconds < AT_ONCE_S


def test_a_rank_that_has_left_does_not_disturb_waits_for_other_ranks(ranks):
    watchdog = ranks.watchdog()
    ranks.local.departures[2] = "left"
    began = time.monotonic()
    watchdog.wait_until(lambda: time.monotonic() - began > 0.5, lambda: STALL)


def test_data_from_a_rank_before_it_left_is_used(ranks):
    watchdog = ranks.watchdog(timeout_s=20)
    ranks.local.departures[1] = "left"
    stalls = itertools.chain([STALL], itertools.repeat(Stall("adding partial sums", (2,), "4 chunks", "3")))
    began = time.monotonic()
    watchdog.wait_until(lambda: time.monotonic() - began > 0.5, lambda: next(stalls))


def leaves(ranks):
    ranks.local.departures[1] = "left"


def dies(ranks):
    ranks.kill(1)


def fails(ranks):
    ranks.local.failure_report = FailureReport((1,), "rank 1 left its communicator", found_by=1, has_left=True)


@pytest.mark.parametrize("end", [leaves, dies, fails])
def test_data_that_came_unseen_before_a_rank_ended_is_used(ranks, clock, end):
    has_ended = []

    def stall():  # between looking for data and looking for ranks that are gone
        if not has_ended:
            has_ended.append(end(ranks))
        return STALL

    ranks.watchdog(timeout_s=20).wait_until(lambda: bool(has_ended), stall)


def test_data_that_came_unseen_before_the_network_failed_is_used(ranks, clock):
    watchdog, failures = ranks.watchdog(timeout_s=20), []
    watchdog.add_network_probe(lambda: failures[0] if failures else "")

    def stall():
        failures.append("the network failed to receive (rank 1): the connection was closed")
        return STALL

    watchdog.wait_until(lambda: bool(failures), stall)


@pytest.mark.parametrize("end", [leaves, dies, fails])
def test_data_is_used_as_long_as_it_moves_after_a_rank_ended(ranks, clock, end):
    watchdog, num_pieces = ranks.watchdog(timeout_s=20), itertools.count()
    end(ranks)

    def poll():
        clock.now_s += 0.001
        return next(num_pieces) % 5 == 0

    watchdog.add_poll(poll)
    watchdog.wait_until(lambda: clock.now_s > 0.9, lambda: STALL)


def test_what_moves_between_others_delays_the_blame_of_a_dead_rank_for_a_second_only(ranks, clock):
    watchdog = ranks.watchdog(timeout_s=20)
    ranks.kill(1)

    def wait_on():
        while clock.now_s < AT_ONCE_S:
            watchdog.pause(lambda: STALL)
            watchdog.progress()

    with pytest.raises(PeerFailureError, match=r"rank 1 .* is dead"):
        wait_on()
    assert 0.9 < clock.now_s < 1.1


def test_the_last_bytes_of_a_rank_of_another_machine_may_come_later_than_word_that_it_left(ranks, clock):
    ranks.peers[1] = replace(ranks.peers[1], is_on_this_machine=False)
    watchdog = ranks.watchdog(timeout_s=20)
    leaves(ranks)
    watchdog.wait_until(lambda: clock.now_s > 0.9, lambda: STALL)
    with pytest.raises(PeerFailureError, match="rank 1 left"):
        watchdog.wait_until(lambda: False, lambda: STALL)
    assert clock.now_s < 0.9 + 1.1


def test_leaving_reports_a_departure_and_no_failure(ranks):
    ranks.watchdog().leave("left")
    assert [other.departures for other in ranks.others] == [{0: "left"}] * 3
    assert {other.failure_report for other in ranks.others} == {None}


def test_an_error_that_cannot_be_reported_is_raised_all_the_same(ranks, monkeypatch):
    watchdog = ranks.watchdog()
    ranks.kill(1)
    monkeypatch.setattr(ranks.local, "report_failure", lambda *_: (_ for _ in ()).throw(MemoryError("no room")))
    if sys.version_info >= (3, 11):
        error, _ = failure_of(watchdog)
        assert error.__notes__ == ["the other ranks could not be notified: MemoryError: no room"]
    else:
        with pytest.warns(RuntimeWarning, match="the other ranks could not be notified: MemoryError: no room"):
            error, _ = failure_of(watchdog)
    assert error.peers == (1,)


def test_a_rank_that_could_not_be_asked_is_not_called_dead(ranks, monkeypatch):
    monkeypatch.setattr(ranks.local, "ask", lambda ranks, _: dict.fromkeys(ranks, Unasked("could not be asked")))
    error, _ = failure_of(ranks.watchdog(timeout_s=0.5))
    assert (error.peers, error.has_left) == ((1,), False)
    assert "rank 1 could not be asked for its status" in error.reason


def test_asking_all_ranks_raises_a_failure_report_of_another_rank(ranks):
    watchdog = ranks.watchdog()
    ranks.local.failure_report = FailureReport((3,), "rank 3 is late", found_by=2, has_left=False)
    with pytest.raises(PeerFailureError, match=r"rank 3 is late \(found by rank 2\)"):
        watchdog.query_all_ranks(STALL, "no connection")


def error_of_check(watchdog):
    """Return the error that ``check`` raises as soon as it raises one, and the time until then in seconds."""
    began = time.monotonic()

    def check_often():
        while time.monotonic() - began < AT_ONCE_S:
            watchdog.check()
            time.sleep(0.001)

    with pytest.raises(PeerFailureError) as caught:
        check_often()
    return caught.value, time.monotonic() - began


def test_a_check_raises_nothing_where_all_is_well(ranks):
    watchdog = ranks.watchdog()
    watchdog.add_network_probe(str)
    watchdog.add_device_probe(lambda: None)
    for _ in range(60):
        watchdog.check()
        time.sleep(0.001)


def test_a_check_names_the_dead(ranks):
    watchdog = ranks.watchdog()
    watchdog.check()
    ranks.processes[1].kill()
    error, seconds = error_of_check(watchdog)
    assert (error.peers, error.operation, error.has_left) == ((2,), "check", True)
    assert error.stall == Stall("checking all ranks", (2,), "every rank at work", "fewer")
    assert error.reason == f"rank 2 (pid {ranks.peers[2].pid}) is dead"
    assert seconds < AT_ONCE_S
    assert {ranks.others[i].failure_report.peers for i in (0, 2)} == {(2,)}


def test_a_check_says_which_wait_of_the_device_ended(ranks):
    watchdog = ranks.watchdog()
    watchdog.add_device_probe(lambda: STALL)
    ranks.kill(1)
    error, _ = error_of_check(watchdog)
    assert (error.peers, error.stall) == ((1,), STALL)


def test_a_check_blames_a_silent_rank_for_a_wait_of_the_device_that_timed_out(ranks):
    ranks.deafen(3)
    watchdog = ranks.watchdog()
    watchdog.add_device_probe(lambda: STALL)
    error, _ = error_of_check(watchdog)
    assert error.peers == (3,)
    assert error.reason.startswith("a wait of the device ended without what it waited for; rank 3 does not answer")


def test_a_check_raises_what_another_rank_has_reported(ranks):
    watchdog = ranks.watchdog()
    ranks.local.failure_report = FailureReport((3,), "rank 3 is dead", found_by=2, has_left=True)
    assert error_of_check(watchdog)[0].reason == "rank 3 is dead (found by rank 2)"


def test_a_check_names_ranks_that_have_left_or_whose_connection_is_closed(ranks):
    ours, theirs = socket.socketpair()
    watchdog = ranks.watchdog()
    watchdog.add_connections({1: ours.fileno()})
    ranks.others[1].report_departure({0: ranks.local.address}, 2, "left its communicator", AT_ONCE_S)
    theirs.close()
    error, _ = error_of_check(watchdog)
    assert error.peers == (1, 2)
    assert error.reason == "rank 1 is dead or has left: its connection is closed; rank 2 left its communicator"
    ours.close()


def test_a_check_names_a_rank_once_that_is_dead_and_has_left_and_is_disconnected(ranks):
    ours, theirs = socket.socketpair()
    watchdog = ranks.watchdog()
    watchdog.add_connections({1: ours.fileno()})
    leaves(ranks)
    ranks.kill(1)
    theirs.close()
    assert error_of_check(watchdog)[0].peers == (1,)
    assert ranks.others[2].failure_report.peers == (1,)
    ours.close()


def test_a_check_raises_a_failure_of_the_network(ranks):
    watchdog = ranks.watchdog()
    watchdog.add_network_probe(lambda: "the network failed to send (rank 2)")
    assert "the network failed to send (rank 2)" in error_of_check(watchdog)[0].reason
