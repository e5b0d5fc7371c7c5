"""A call in a thread: its result, or whatever it raises."""

import threading
from unittest import mock

import pytest

from fusco.control.threads import in_thread, within


def test_the_result_comes_when_it_is_there():
    may_go_on = threading.Event()
    future = in_thread(lambda: may_go_on.wait() and 7)
    assert not future.done()
    may_go_on.set()
    assert future.result(timeout=10) == 7


@pytest.mark.parametrize("error", [RuntimeError("no"), OSError("no"), AssertionError("no")], ids=repr)
def test_whatever_goes_wrong_is_told_and_not_waited_for(error):
    def fail():
        raise error

    assert in_thread(fail).exception(timeout=10) is error


def test_a_call_is_waited_for_up_to_a_limit():
    may_go_on, has_gone_on = threading.Event(), threading.Event()
    assert not within(0.05, lambda: may_go_on.wait() and has_gone_on.set())
    may_go_on.set()
    assert has_gone_on.wait(10)
    assert within(10, threading.Event().is_set)


def test_what_a_call_raises_in_time_is_raised():
    with pytest.raises(ZeroDivisionError):
        within(10, lambda: 1 // 0)


def test_where_no_thread_starts_any_more_the_call_is_made_here():
    callers = []
    with mock.patch.object(threading.Thread, "start", side_effect=RuntimeError("can't create new thread")):
        assert within(10, lambda: callers.append(threading.current_thread()))
    assert callers == [threading.current_thread()]
