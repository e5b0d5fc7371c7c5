"""A benchmark's process: functions run there on its state, and whatever ends it is told."""

import os
from contextlib import contextmanager

import pytest

from fusco.bench.worker import Worker


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
        with pytest.raises(RuntimeError, match="the worker has died"):
            worker.call(lethal, 1)
    assert not worker.process.is_alive()


def lethal(_state, code):
    os._exit(code)
