"""Calls in daemon threads: results, errors, time limits."""

import threading
from unittest import mock

import pytest

from fusco.core.threads import in_thread, within


def test_a_future_is_done_when_the_call_returns():
    may_go_on = threading.Event()
    future = in_thread(lambda: may_go_on.wait() and 7, "waiting")
    assert not future.done()
    may_go_on.set()
    assert future.result(timeout=10) == 7


@pytest.mark.parametrize("error", [RuntimeError("no"), OSError("no"), AssertionError("no")], ids=repr)
def test_an_error_completes_the_future(error):
    def fail():
        raise error

    assert in_thread(fail, "failing").exception(timeout=10) is error


def test_a_call_is_waited_for_up_to_a_limit():
    may_go_on, has_gone_on = threading.Event(), threading.Event()
    assert not within(0.05, lambda: may_go_on.wait() and has_gone_on.set(), "waiting")
    may_go_on.set()
    assert has_gone_on.wait(10)
    assert within(10, threading.Event().is_set, "asking")


def test_what_a_call_raises_in_time_is_raised():
    with pytest.raises(ZeroDivisionError):
        within(10, lambda: 1 // 0, "dividing")


def test_the_calling_thread_makes_the_call_if_no_thread_starts():
    callers = []
    with mock.patch.object(threading.Thread, "start", side_effect=RuntimeError("can't create new thread")):
        assert within(10, lambda: callers.append(threading.current_thread()), "noting")
    assert callers == [threading.current_thread()]
