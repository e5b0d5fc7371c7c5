"""A call in a thread: its result, or whatever it raises."""

import threading

import pytest

from fusco.transport.in_thread import in_thread


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
