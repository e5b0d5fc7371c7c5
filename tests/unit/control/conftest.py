"""Fixtures of the tests of watchdogs."""

from contextlib import ExitStack

import pytest
from watched_ranks import Ranks, SleepClock


@pytest.fixture
def ranks():
    with ExitStack() as stack:
        yield Ranks(stack, num_others=3)


@pytest.fixture
def clock(monkeypatch):
    """The clock of all watchdogs in a test."""
    clock = SleepClock()
    for module in ("fault_finder", "watchdog"):
        monkeypatch.setattr(f"fusco.control.{module}.time", clock)
    return clock
