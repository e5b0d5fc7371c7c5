"""A watchdog times out within its limit, and blames ranks that are silent, late, or waited for, in that order."""

import sys

import pytest
from watched_ranks import AT_ONCE_S, LOCAL_DEVICE, SLACK_S, STALL, TIMEOUT_S, failure_of

from fusco.control.status_server import FailureReport, Unasked
from fusco.core.errors import PeerFailureError, Stall
from played_network import PlayedNetwork


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

    watchdog.watch_network(PlayedNetwork(poll=poll), {}, polls=True)
    watchdog.wait_until(lambda: clock.slept_s > 1.0, lambda: STALL)
    assert num_polls > 10


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


def test_all_ranks_are_asked_at_once_after_a_network_failure(ranks):
    ranks.leave(2)
    watchdog = ranks.watchdog()
    watchdog.watch_network(PlayedNetwork(), {}, polls=False)  # another network, which works
    watchdog.watch_network(PlayedNetwork(lambda: "the network failed to send (rank 2)"), {}, polls=False)
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
    watchdog.watch_network(
        PlayedNetwork(lambda: setattr(ranks.local, "failure_report", report) or "the network failed"), {}, polls=False
    )
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
