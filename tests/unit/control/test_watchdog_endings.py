"""Ranks that die or leave: who is told, when, and what becomes of the data that they sent before."""

import itertools
import time
from dataclasses import replace

import pytest
from watched_ranks import AT_ONCE_S, LOCAL_DEVICE, STALL, TIMEOUT_S, failure_of, leaves

from fusco.control.status_server import FailureReport
from fusco.core.errors import PeerFailureError, Stall
from played_network import PlayedNetwork


def test_a_death_is_noticed_while_spinning(ranks):
    watchdog = ranks.watchdog(spin_s=10 * TIMEOUT_S)
    ranks.kill(1)
    began = time.monotonic()
    with pytest.raises(PeerFailureError) as caught:
        watchdog.wait_until(lambda: False, lambda: STALL)
    assert caught.value.peers == (1,)
    assert time.monotonic() - began < AT_ONCE_S


def test_a_rank_that_waits_for_its_local_device_notices_any_dead_rank_at_once(ranks):
    watchdog = ranks.watchdog()
    ranks.kill(3)
    error, seconds = failure_of(watchdog, LOCAL_DEVICE)
    assert (error.peers, error.has_left) == ((3,), True)
    assert seconds < AT_ONCE_S


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
    watchdog.watch_network(PlayedNetwork(lambda: failures[0] if failures else ""), {}, polls=False)

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

    watchdog.watch_network(PlayedNetwork(poll=poll), {}, polls=True)
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
