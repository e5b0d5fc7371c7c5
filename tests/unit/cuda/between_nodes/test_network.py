"""Messages between nodes are watched until they have travelled, and a network ends in time."""

from __future__ import annotations

import threading
import time

import pytest
from network_mocks import LIMIT_S, RECEIVES, SENDS, SLACK_S, network_to

from fusco.core.errors import Stall


@pytest.fixture
def network():
    with network_to(1) as network:
        yield network


@pytest.mark.parametrize(("num_remote_nodes", "channels"), [(1, 4), (2, None), (3, None), (7, None)])
def test_one_other_node_gets_more_channels_than_nccl_would_take(num_remote_nodes, channels):
    with network_to(num_remote_nodes) as network:
        assert network._nccl.channels_per_peer == channels


def test_messages_are_watched_over_until_the_event_behind_them(network):
    done = network.exchange(SENDS, RECEIVES, "slice 4")
    assert network._nccl.launches == [(SENDS, RECEIVES, 77)]
    assert network.gpu.events == [done]
    assert done.stream is network.stream
    assert network._nccl.has_aborted.wait(SLACK_S)
    assert network.nccl_watchdog.stall == Stall("the network", (2, 3), "slice 4", "not all of 2,000 bytes")


def test_messages_that_have_travelled_are_forgotten(network):
    network.exchange(SENDS, RECEIVES, "slice 4").is_done = True
    time.sleep(1.5 * LIMIT_S)
    assert network.nccl_watchdog.stall is None
    assert not network._nccl.aborts


def test_a_launch_that_hangs_is_ended_within_the_limit(network):
    network._nccl.hangs = True
    began = time.monotonic()
    network.exchange(SENDS, [], "routing")
    assert LIMIT_S <= time.monotonic() - began < LIMIT_S + SLACK_S
    assert network.nccl_watchdog.stall == Stall("the network", (3,), "routing", "not all of 0 bytes")


def test_closing_a_network_ends_what_is_under_way(network):
    network.exchange(SENDS, RECEIVES, "slice 4")
    network.close()
    assert not network.nccl_watchdog._thread.is_alive()
    assert network.nccl_watchdog.stall is None
    assert len(network._nccl.aborts) == 1


def test_a_network_that_finishes_ends_nothing(network):
    network.exchange(SENDS, RECEIVES, "slice 4").is_done = True
    network.finish()
    assert not network.nccl_watchdog._thread.is_alive()
    assert (len(network._nccl.finishes), network._nccl.aborts) == (1, [])


@pytest.mark.parametrize("how", ["finish", "close"])
def test_a_network_that_does_not_end_is_left_to_a_thread(network, how):
    may_end, has_ended = threading.Event(), threading.Event()

    def hang():
        may_end.wait()
        has_ended.set()

    network._nccl.finish = network._nccl.abort = hang
    began = time.monotonic()
    with pytest.warns(UserWarning, match=r"NCCL has not freed its resources on cuda:3 within 0\.1 s"):
        getattr(network, how)()
    assert time.monotonic() - began < LIMIT_S + SLACK_S
    may_end.set()
    assert has_ended.wait(SLACK_S)
    network._nccl.abort = lambda: None
