"""Messages that a graph replays have the limit of those that are launched."""

from __future__ import annotations

import threading
import time
from unittest import mock

import pytest
from network_mocks import LIMIT_S, NO_LIMIT_S, RECEIVES, SENDS, SLACK_S, network_to

from fusco.core.errors import Stall


@pytest.fixture
def captured():
    """A network whose messages were captured in a graph."""
    with network_to(1) as network:
        network.gpu.is_captured = True
        network.exchange(SENDS, RECEIVES, "slice 0")
        yield network


def test_captured_messages_are_no_launched_ones(captured):
    assert captured._nccl.launches == [(SENDS, RECEIVES, 77)]
    assert captured._replays.calls == [("begin", captured.stream), ("end", captured.stream)]
    time.sleep(1.5 * LIMIT_S)  # the event of the capture must not be queried, and would never be done
    assert captured.nccl_watchdog.stall is None


def test_replays_that_complete_are_left_alone_however_many_there_are(captured):
    for _ in range(30):
        captured._replays.replay(is_done=True)
        captured._replays.replay(is_done=False)  # each time that the watchdog looks, the device waits
        time.sleep(LIMIT_S / 10)
    assert captured.nccl_watchdog.stall is None


def test_a_replay_that_does_not_complete_is_ended_within_the_limit(captured):
    captured._replays.replay(is_done=True)
    time.sleep(0.1)
    captured._replays.replay(is_done=False)
    began = time.monotonic()
    assert captured._nccl.has_aborted.wait(SLACK_S)
    assert LIMIT_S - 0.05 <= time.monotonic() - began < LIMIT_S + SLACK_S
    assert captured.nccl_watchdog.stall == Stall(
        "the network", (2, 3), "messages of a replayed graph", "not all of them"
    )


@pytest.mark.parametrize("is_waiting", [True, False])
def test_a_rank_that_is_gone_ends_a_replay_that_waits(captured, is_waiting):
    captured._replays.replay(is_done=not is_waiting)
    with mock.patch.object(captured.nccl_watchdog, "_timeout_s", NO_LIMIT_S):
        captured._watchdog.has_failed_rank = True
        assert captured._nccl.has_aborted.wait(SLACK_S if is_waiting else 0.2) == is_waiting


def test_a_network_with_graphs_does_not_wait_for_the_end_of_nccl(captured):
    """Until they are deleted, NCCL keeps what they use."""
    may_end = threading.Event()
    captured._nccl.finish = may_end.wait
    began = time.monotonic()
    captured.finish()  # and warns of nothing
    assert time.monotonic() - began < SLACK_S
    may_end.set()
