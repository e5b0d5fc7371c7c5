"""A communicator is for one thread of the process that made it; errors in all others name the owner."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
import torch

from fusco.core.access import Access
from fusco.core.errors import ClosedError, ThreadError

LIMIT_S = 20.0


def in_thread(function, name="another"):
    """Return a function's result or error in a thread that ends afterwards."""
    results = []

    def run():
        try:
            results.append(function())
        except Exception as error:  # noqa: BLE001
            results.append(error)

    thread = threading.Thread(target=run, name=name)
    thread.start()
    thread.join(LIMIT_S)
    return results[0]


def use(access, operation="combine"):
    with access.using(operation):
        return threading.current_thread().name


@pytest.fixture
def access():
    return Access("rank 3's communicator #7")


def test_the_error_in_a_second_thread_names_the_owner(access):
    use(access)
    error = in_thread(lambda: use(access, "dispatch"))
    assert type(error) is ThreadError
    assert str(error).startswith(
        "thread 'another' called dispatch on rank 3's communicator #7, which belongs to thread 'MainThread', the first "
    )
    assert use(access) == "MainThread"  # which is not affected


def test_the_thread_that_makes_one_need_not_be_the_one_that_uses_it(access):
    with ThreadPoolExecutor(1, thread_name_prefix="worker") as pool:
        assert [pool.submit(use, access).result(LIMIT_S) for _ in range(3)] == ["worker_0"] * 3
        with pytest.raises(ThreadError, match="belongs to thread 'worker_0'"):
            use(access)


def test_another_thread_may_follow_one_that_has_ended(access):
    assert in_thread(lambda: use(access)) == "another"
    assert in_thread(lambda: use(access), "a third") == "a third"
    assert use(access) == "MainThread"


def test_a_thread_hands_over(access):
    use(access)
    assert type(in_thread(access.hand_over)) is ThreadError
    access.hand_over()
    with ThreadPoolExecutor(1, thread_name_prefix="worker") as pool:
        assert pool.submit(use, access).result(LIMIT_S) == "worker_0"


def test_threads_that_take_turns_own_nothing_and_still_exclude_each_other(access):
    use(access)
    assert type(in_thread(access.take_turns)) is ThreadError
    access.take_turns()
    with ThreadPoolExecutor(1, thread_name_prefix="worker") as pool:
        for _ in range(2):
            assert pool.submit(use, access).result(LIMIT_S) == "worker_0"
            assert use(access) == "MainThread"
    with access.using("dispatch"):
        assert "while dispatch of thread 'MainThread' is under way" in str(in_thread(lambda: use(access)))


def test_a_call_for_any_thread_is_rejected_during_a_call_of_another(access):
    use(access)

    def close():
        with access.alone("close"):
            return "closed"

    assert in_thread(close) == "closed"
    with access.using("dispatch"):
        error = in_thread(close)
    assert type(error) is ThreadError
    assert str(error) == (
        "thread 'another' called close on rank 3's communicator #7 while dispatch of thread 'MainThread' is under way; "
        "a communicator is for one thread"
    )


def test_a_thread_may_close_it_during_its_own_call(access):
    """Signal handlers do so; what is to follow the call waits for its end."""
    ended = []
    assert access.interrupted == ""
    with access.using("dispatch"):
        assert access.interrupted == "dispatch"
        access.at_end(lambda: ended.append(access.interrupted))
        with access.alone("leave"):
            pass
        assert ended == []
    assert ended == [""]
    assert in_thread(lambda: access.alone("close").__enter__()) is None


class Step(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, call):
        ctx.call = call
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.call()
        return grad, None


def backward(call):
    Step.apply(torch.ones(1, requires_grad=True), call).sum().backward()


def test_a_backward_pass_of_another_thread_is_refused_where_it_runs_in_that_thread(access):
    use(access)
    backward(lambda: use(access))
    assert type(in_thread(lambda: backward(lambda: use(access)))) is ThreadError


def test_autograds_own_threads_may_use_it_in_a_backward_pass(access):
    use(access)
    alien = mock.Mock(spec=threading._DummyThread)
    alien.name = "Dummy-1"
    outcomes = []

    def call():
        with mock.patch.object(threading, "current_thread", return_value=alien):
            outcomes.append(use(access))

    def as_an_alien():
        with mock.patch.object(threading, "current_thread", return_value=alien):
            use(access)

    in_thread(lambda: backward(call))
    assert outcomes == ["Dummy-1"]
    assert type(in_thread(as_an_alien)) is ThreadError  # in no backward pass


def test_the_owner_is_not_kept_alive(access):
    """A thread may hold its communicator, which then holds the thread."""

    class Worker(threading.Thread):
        def run(self):
            use(access)

    worker = Worker()
    worker.start()
    worker.join(LIMIT_S)
    assert access._owner() is worker
    del worker
    assert access._owner() is None


def test_the_error_in_a_forked_process_names_both_processes(access):
    with mock.patch.object(os, "getpid", return_value=4711):
        assert not access.is_own_process
        with pytest.raises(ClosedError) as caught:
            use(access, "dispatch")
    assert str(caught.value) == (
        f"dispatch was called in process 4711, but rank 3's communicator #7 belongs to process {os.getpid()}, which "
        f"made it: processes forked from that one cannot use it"
    )


def test_it_costs_a_few_microseconds_at_most(access):
    num_calls, fastest = 2000, float("inf")
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(num_calls):
            with access.using("dispatch"):
                pass
        fastest = min(fastest, (time.perf_counter() - began) / num_calls)
    assert fastest < 10e-6  # a loaded machine's; 1 us where nothing else runs
