"""A wait for counters ends with the counters, with a socket, or soon."""

import ctypes
import socket
import statistics
import threading
import time

import numpy as np
import pytest
import torch

from fusco.control import counters, repeated_record
from fusco.control.counters import CounterWait, no_counters, readable, warm_up_counters, writable
from fusco.control.flags import Flags
from fusco.control.machine_calls import address_of, yield_words
from fusco.control.status_server import StatusServer
from fusco.control.watchdog import Watchdog
from fusco.core.errors import Stall
from played_network import PlayedNetwork

AT_ONCE_S = 5.0  # limit of what takes microseconds, on a loaded machine
STALL = Stall("waiting", (), "a counter", "none")


@pytest.fixture(scope="module", autouse=True)
def compiled():
    warm_up_counters()


@pytest.fixture
def memory():
    return torch.zeros(2, dtype=torch.int64)


@pytest.fixture
def sockets():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def counters_of(memory, *values):
    return np.array([(memory.data_ptr() + 8 * i, value) for i, value in enumerate(values)], np.int64)


def looks(wait, *args, **options):
    """Return how long both kinds of waits take."""
    times = []
    for look in (wait.spin, wait.sleep):
        began = time.monotonic()
        look(*args, **options)
        times.append(time.monotonic() - began)
    return times


def test_spins_on_a_busy_core_end_before_the_next_look_for_dead_ranks(memory):
    """By their numbers of yields they would take half a second, and one."""
    yields = []
    busy = ctypes.CFUNCTYPE(ctypes.c_int)(lambda: yields.append(time.sleep(0.005)) or 0)  # as sched_yield takes there
    busy_core = address_of(busy)
    wait, record = CounterWait(), np.zeros(repeated_record._NUM_WORDS + 1, np.int64)
    wait._words[counters._YIELD] = busy_core
    record[repeated_record._NUM_LOCAL], record[-1] = 1, memory.data_ptr()
    record[repeated_record._YIELD : -1] = [busy_core, *yield_words()[1:]]
    for spin in (
        lambda: wait.spin(counters_of(memory, 1), [], is_any=False),
        lambda: repeated_record._wait_for(record, len(record) - 1, 0, 1),
    ):
        yields.clear()
        spin()
        assert 1 < len(yields) < 7


@pytest.mark.parametrize(("is_any", "values"), [(False, (3, 0)), (True, (3, 9)), (True, (9, 0))])
def test_counters_with_their_values_end_the_wait(memory, is_any, values):
    memory[0] = 3
    wait = CounterWait()
    for _ in range(300):  # each of which would sleep for 4 ms otherwise
        wait.sleep(counters_of(memory, *values), [], is_any=is_any)
    assert max(looks(wait, counters_of(memory, *values), [], is_any=is_any)) < AT_ONCE_S


@pytest.mark.parametrize(("is_any", "values"), [(False, (3, 1)), (True, (4, 1))])
def test_a_wait_for_more_ends_soon_all_the_same_and_has_slept(memory, is_any, values):
    memory[0] = 3
    spun, slept = looks(CounterWait(), counters_of(memory, *values), [], is_any=is_any)
    assert spun < AT_ONCE_S
    assert 0.004 <= slept < AT_ONCE_S


def test_a_socket_that_is_ready_wakes_the_rank(sockets):
    ours, theirs = sockets
    wait = CounterWait()
    began = time.monotonic()
    wait.sleep(no_counters(), [readable(ours.fileno())], is_any=True)
    assert time.monotonic() - began >= 0.004  # nothing to read yet
    theirs.send(b"x")
    took_s = []
    for socket_is_ready in (readable(ours.fileno()), writable(ours.fileno())) * 100:
        began = time.monotonic()
        wait.sleep(no_counters(), [socket_is_ready], is_any=True)
        took_s.append(time.monotonic() - began)
    assert statistics.median(took_s) < 0.004  # a wait to its end takes that


@pytest.mark.parametrize("spin_s", [0.0, 10.0])
def test_the_watchdog_waits_for_counters(memory, spin_s):
    flags, until = Flags(memory), 0.05
    status_server = StatusServer("secret", "127.0.0.1")
    watchdog = Watchdog(0, {}, status_server, 60.0, spin_s)
    num_looks = 0

    def is_ready():
        nonlocal num_looks
        num_looks += 1
        return flags.load(0) >= 5

    thread = threading.Timer(until, flags.store, (0, 5))
    thread.start()
    try:
        watchdog.wait_until(is_ready, lambda: STALL, counters_of(memory, 5))
    finally:
        thread.join()
        watchdog.close()
        status_server.close()
    assert num_looks > 1


def test_a_network_whose_sockets_are_unknown_is_polled_in_every_wait(memory):
    flags = Flags(memory)
    status_server = StatusServer("secret", "127.0.0.1")
    watchdog = Watchdog(0, {}, status_server, 60.0, 10.0)
    num_polls = 0

    def poll():
        nonlocal num_polls
        num_polls += 1
        if num_polls == 300:
            flags.store(0, 5)
        return False

    watchdog.watch_network(PlayedNetwork(poll=poll), {}, polls=True)
    began = time.monotonic()
    try:
        watchdog.wait_until(lambda: flags.load(0) >= 5, lambda: STALL, counters_of(memory, 5))
    finally:
        watchdog.close()
        status_server.close()
    assert num_polls == 300
    assert time.monotonic() - began < AT_ONCE_S
