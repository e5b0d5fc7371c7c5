"""``Watchdog.check`` raises what has gone wrong, without a wait."""

import socket
import time

import pytest
from watched_ranks import AT_ONCE_S, STALL, leaves

from fusco.control.status_server import FailureReport
from fusco.core.errors import PeerFailureError, Stall
from played_network import PlayedNetwork


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
    watchdog.watch_network(PlayedNetwork(), {}, polls=False)
    watchdog.watch_device(lambda: None)
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
    watchdog.watch_device(lambda: STALL)
    ranks.kill(1)
    error, _ = error_of_check(watchdog)
    assert (error.peers, error.stall) == ((1,), STALL)


def test_a_check_blames_a_silent_rank_for_a_wait_of_the_device_that_timed_out(ranks):
    ranks.deafen(3)
    watchdog = ranks.watchdog()
    watchdog.watch_device(lambda: STALL)
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
    watchdog.watch_network(PlayedNetwork(), {1: ours.fileno()}, polls=False)
    ranks.others[1].report_departure({0: ranks.local.address}, 2, "left its communicator", AT_ONCE_S)
    theirs.close()
    error, _ = error_of_check(watchdog)
    assert error.peers == (1, 2)
    assert error.reason == "rank 1 is dead or has left: its connection is closed; rank 2 left its communicator"
    ours.close()


def test_a_check_names_a_rank_once_that_is_dead_and_has_left_and_is_disconnected(ranks):
    ours, theirs = socket.socketpair()
    watchdog = ranks.watchdog()
    watchdog.watch_network(PlayedNetwork(), {1: ours.fileno()}, polls=False)
    leaves(ranks)
    ranks.kill(1)
    theirs.close()
    assert error_of_check(watchdog)[0].peers == (1,)
    assert ranks.others[2].failure_report.peers == (1,)
    ours.close()


def test_a_check_raises_a_failure_of_the_network(ranks):
    watchdog = ranks.watchdog()
    watchdog.watch_network(PlayedNetwork(lambda: "the network failed to send (rank 2)"), {}, polls=False)
    assert "the network failed to send (rank 2)" in error_of_check(watchdog)[0].reason
