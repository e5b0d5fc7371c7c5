"""All-gathers through a store that stops or dies: a limit, and the ranks at fault if known."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from datetime import timedelta
from pkgutil import resolve_name

import pytest
import torch.distributed as dist

from fusco.api.create import CommunicatorConfig, create
from fusco.core.errors import PeerFailureError, TransportError
from store_gathers import ThreadStoreGather, on_ranks

SLACK_S = 3.0
SERVE = """
import time, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(600)
"""


class Store:
    """A store of this process that can stop answering, or be lost."""

    def __init__(self):
        self._store = dist.HashStore()
        self.is_lost, self.may_answer = False, threading.Event()
        self.may_answer.set()

    def _reach(self):
        self.may_answer.wait()
        if self.is_lost:
            raise RuntimeError("Connection reset by peer\nwith a traceback of C++")

    def set(self, key, value):
        self._reach()
        self._store.set(key, value)

    def check(self, keys):
        self._reach()
        return self._store.check(keys)

    def get(self, key):
        self._reach()
        return self._store.get(key)


@contextmanager
def later(seconds, do):
    timer = threading.Timer(seconds, do)
    timer.start()
    yield
    timer.join()


def test_a_stopped_process_that_serves_the_store_is_not_waited_for_beyond_the_limit():
    with subprocess.Popen([sys.executable, "-c", SERVE], stdout=subprocess.PIPE, text=True) as server:
        try:
            port = int(server.stdout.readline())
            store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
            store_gather = ThreadStoreGather(0, 2, store, 1.5)
            os.kill(server.pid, signal.SIGSTOP)
            began = time.monotonic()
            with pytest.raises(TransportError, match=rf"store at 127\.0\.0\.1:{port} .* did not answer within 1\.5 s"):
                store_gather.all_gather("bootstrap", 1)
            assert time.monotonic() - began < 1.5 + SLACK_S
        finally:
            server.kill()


def test_a_watcher_checks_the_ranks_while_the_store_is_silent():
    store, stalls = Store(), []

    class Watcher:
        def wait_until(self, is_ready, stall):
            time.sleep(1.2)
            stalls.append(stall())
            raise PeerFailureError(
                rank=1, peers=(0,), operation="", stall=stall(), reason="rank 0 does not answer", has_left=False
            )

    store_gather = ThreadStoreGather(1, 2, store, 20.0)
    store_gather.watched_by(Watcher())
    store.may_answer.clear()
    with pytest.raises(PeerFailureError, match="rank 0 does not answer"):
        store_gather.all_gather("segment", 1)
    store.may_answer.set()
    assert (stalls[0].phase, stalls[0].on_ranks) == ("segment", ())
    assert stalls[0].expected == "an answer of the process group's store"


LOST = (
    "the process group's store cannot be reached: the process that serves it, or its host, has gone away "
    "(Connection reset by peer)"
)


def test_the_error_of_a_lost_store_names_no_rank():
    """All ranks leave for it, some before others look, so none is known to be at fault."""
    store, told = Store(), []

    class Watcher:
        def wait_until(self, is_ready, stall):
            while not is_ready():
                time.sleep(0.01)

        def give_up(self, reason, at_fault):
            told.append((reason, at_fault))

    def gather(store_gather):
        if store_gather.rank:
            store_gather.watched_by(Watcher())
        return store_gather.all_gather("bootstrap", 1)

    with later(0.6, lambda: setattr(store, "is_lost", True)):
        errors = on_ranks(4, gather, absent=(1, 3), store=store)
    assert [(type(error), str(error)) for error in errors.values()] == [(TransportError, LOST)] * 2
    assert told == [(LOST, ())], "ranks that need the store no more learn why this one leaves"


def test_a_store_that_stays_silent_while_all_ranks_answer_is_to_blame():
    store = Store()

    class Watcher:
        def wait_until(self, is_ready, stall):
            raise PeerFailureError(rank=1, peers=(), operation="", stall=stall(), reason="no store", has_left=False)

    store_gather = ThreadStoreGather(1, 2, store, 20.0)
    store_gather.watched_by(Watcher())
    store.may_answer.clear()
    with pytest.raises(TransportError, match="no store"):
        store_gather.all_gather("segment", 1)
    store.may_answer.set()


def test_the_first_rank_that_fails_waits_for_the_others():
    """Its process may serve the store."""
    left = {}

    def fail(store_gather):
        time.sleep(1.0 * store_gather.rank)
        store_gather.part()
        left[store_gather.rank] = time.monotonic()

    on_ranks(2, fail)
    assert abs(left[0] - left[1]) < 0.7


def test_a_rank_that_fails_waits_for_a_short_time_only():
    began = time.monotonic()
    on_ranks(3, lambda store_gather: store_gather.part(without=(2,)), absent=(1, 2), timeout_s=4.0)
    assert 0.2 <= time.monotonic() - began < 0.2 + SLACK_S
    began = time.monotonic()
    on_ranks(3, lambda store_gather: store_gather.part(without=(2,)), absent=(2,))
    assert time.monotonic() - began < SLACK_S


@pytest.mark.parametrize("reaches", ["first", "second"])
def test_ranks_that_miss_the_value_of_a_rank_that_fails_raise_at_once(reaches):
    def make(store_gather):
        if store_gather.rank == 1:
            if reaches == "second":
                store_gather.all_gather("first", 1)
            store_gather.part(reason="rank 1 failed: no room")
            return None
        store_gather.all_gather("first", 1)
        return store_gather.all_gather("second", 1)

    began = time.monotonic()
    errors = on_ranks(3, make)
    assert time.monotonic() - began < SLACK_S
    for rank in (0, 2):
        assert isinstance(errors[rank], PeerFailureError)
        assert (errors[rank].peers, errors[rank].reason) == ((1,), "rank 1 failed: no room")
        assert errors[rank].stall.phase == reaches


def test_ranks_that_have_all_values_do_not_raise_for_a_rank_that_fails_afterwards():
    def make(store_gather):
        if store_gather.rank == 0:
            time.sleep(0.3)  # the others look for a failure meanwhile
        values = store_gather.all_gather("first", store_gather.rank)
        if store_gather.rank != 2:
            store_gather.part(reason="all of them raise")
        return values

    assert list(on_ranks(3, make, timeout_s=4.0).values()) == [[0, 1, 2]] * 3


@pytest.mark.parametrize(
    "fault",
    ["fusco.control.bootstrap.host_identity", "fusco.control.connect.Watchdog", "fusco.control.connect.NodeMemory"],
)
def test_a_rank_that_fails_alone_before_it_is_connected_is_named_at_once(monkeypatch, fault):
    here, real = threading.local(), resolve_name(fault)

    def fail_on_rank_1(*args, **kwargs):
        if here.rank == 1:
            raise OSError(24, "Too many open files")
        return real(*args, **kwargs)

    def make(store_gather):
        here.rank = store_gather.rank
        return create(store_gather, config).session.close()

    config = CommunicatorConfig(
        num_experts=2,
        num_topk=1,
        max_tokens_per_rank=1,
        max_bytes_per_token=8,
        expert_placement=None,
        ranks_per_node=1,
        balancer=None,
        device="cpu",
    )
    monkeypatch.setattr("fusco.api.create.check_process_group", lambda group: group)
    monkeypatch.setattr("fusco.api.create.StoreGather", lambda group, _: group)
    monkeypatch.setattr(fault, fail_on_rank_1)
    began = time.monotonic()
    errors = on_ranks(2, make)
    assert time.monotonic() - began < SLACK_S
    assert isinstance(errors[1], OSError)
    assert isinstance(errors[0], PeerFailureError), errors
    assert errors[0].peers == (1,)
    assert "rank 1 failed while it made the communicator: OSError: [Errno 24] Too many open files" in str(errors[0])


def test_an_error_without_a_text_is_named_by_its_type():
    class Silent(Store):
        def _reach(self):
            raise RuntimeError

    with pytest.raises(TransportError, match=r"store cannot be reached: .* has gone away \(RuntimeError\)"):
        ThreadStoreGather(0, 2, Silent(), 20.0).all_gather("bootstrap", 1)


def test_no_thread_is_left_of_all_gathers_that_timed_out():
    before = threading.active_count()
    error = on_ranks(2, lambda store_gather: store_gather.all_gather("bootstrap", 1), absent=(1,), timeout_s=0.2)[0]
    assert isinstance(error, PeerFailureError)
    deadline = time.monotonic() + SLACK_S
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() <= before


def test_the_first_error_is_raised_even_if_parting_fails(monkeypatch):
    class Config:
        class settings:  # noqa: N801
            timeout_s = 1.0

    def fail(*_, **__):
        raise RuntimeError("can't start new thread")

    def refuse(*_, **__):
        raise ValueError("num_experts must be positive")

    monkeypatch.setattr("fusco.api.create.check_process_group", lambda group: group)
    monkeypatch.setattr("fusco.api.create.StoreGather", lambda *_: ThreadStoreGather(0, 1, dist.HashStore(), 1.0))
    monkeypatch.setattr("fusco.api.create._create", refuse)
    monkeypatch.setattr(ThreadStoreGather, "part", fail)
    with pytest.raises(ValueError, match="num_experts must be positive"):
        create(None, Config)
