"""Calls in daemon threads: results, errors, time limits; and the end of a process meanwhile."""

import subprocess
import sys
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


# A thread that asks the process group's store until it is told to end, as after a wait that was given up.
SCRIPT = """
import time
from datetime import timedelta
from torch.distributed import TCPStore
from fusco.core.threads import in_thread

store, until = TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=5)), time.monotonic() + 0.3

def ask():
    while time.monotonic() < until:
        store.check(["nothing"])

in_thread(ask, "asking the store")
time.sleep(0.05)
"""


def test_a_thread_that_is_inside_pytorch_does_not_abort_the_process():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


# Before fusco is imported, so that it runs last.
TIMED = """
import atexit, time

@atexit.register
def tell():
    print(time.monotonic() - began)

import threading
from fusco.core.threads import in_thread, within

never = threading.Event()
{}
began = time.monotonic()
"""


def seconds_of_exit(script: str) -> tuple[float, str]:
    """Return how long the exit of a script's interpreter takes, and what it prints on stderr."""
    arguments = [sys.executable, "-W", "error::DeprecationWarning", "-c", TIMED.format(script)]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=60, check=True)
    return float(done.stdout), done.stderr


def test_all_threads_are_waited_for_together_and_named():
    seconds, said = seconds_of_exit("for name in ('one', 'two', 'three'): in_thread(never.wait, name)")
    assert 0.5 <= seconds < 1.0
    assert "exiting while still running: one, three, two" in said


def test_waits_at_exit_have_one_limit_together():
    seconds, _ = seconds_of_exit(
        "for _ in range(9): atexit.register(lambda: within(1.0, never.wait, 'a communicator'))"
    )
    assert 1.0 <= seconds < 6.0  # the first one's limit, 0.1 s for each other; one after the other takes 9 s
