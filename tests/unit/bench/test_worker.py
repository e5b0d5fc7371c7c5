"""A benchmark's process: functions run there on its state, and whatever ends it is told."""

import os
import time
from contextlib import contextmanager

import pytest

from fusco.bench.harness.worker import Worker
from fusco.bench.names import MAX_CASE_S
from fusco.bench.rails.crew import Member


@contextmanager
def numbers(first):
    yield [first]


def append(state, number):
    state.append(number)
    return list(state)


def test_functions_run_on_the_state_of_the_process_and_errors_are_told():
    with Worker("the worker", "fork", numbers, 1) as worker:
        worker.begin(append, 2)
        assert worker.result() == [1, 2]
        with pytest.raises(RuntimeError, match=r"the worker: Traceback(.|\n)*append"):
            worker.call(append)
        assert worker.call(append, 3) == [1, 2, 3]
        assert not worker.is_done()
        for _ in range(2):  # it dies; it is dead
            with pytest.raises(RuntimeError, match="the worker has died"):
                worker.call(lethal, 1)
    assert not worker.process.is_alive()


def test_what_was_not_read_by_a_process_that_dies_hides_nothing():
    with Worker("the worker", "fork", numbers, 1) as worker:
        worker.begin(lethal, 1)
        worker.begin(append, 2)
        with pytest.raises(RuntimeError, match="the worker has died"):
            worker.result()


def test_a_call_has_a_limit_and_a_role_that_of_the_longest_case(monkeypatch):
    monkeypatch.setattr(Worker, "limit_s", 0.05)
    with Worker("the worker", "fork", numbers, 1) as worker:
        with pytest.raises(RuntimeError, match=r"the worker has not finished within 0\.05 s"):
            worker.call(sleep)
        worker.process.kill()
    assert Member.limit_s > MAX_CASE_S


def sleep(_state):
    time.sleep(60)


def lethal(_state, code):
    os._exit(code)
