"""Times of calls in a row: as many repetitions as fit, each begun with an idle device."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from fusco.bench.harness import stopwatch
from fusco.bench.harness.stopwatch import NUM_CALLS_IN_A_ROW, RankTimer


@pytest.fixture
def timer():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield RankTimer(dist.group.WORLD, "cpu")
    dist.destroy_process_group()


def test_fast_calls_are_repeated_more_often(timer, monkeypatch):
    assert len(timer.loop_times_ms(lambda: None)) == 20
    monkeypatch.setattr(stopwatch, "_LOOPS_S", 1e-9)
    assert len(timer.loop_times_ms(lambda: None)) == 3


def test_times_are_of_one_call(timer):
    times = timer.idle_times_ms(lambda: time.sleep(0.5e-3), 4)
    assert len(times) == 4
    assert 0.5 <= min(times) < 0.5 * NUM_CALLS_IN_A_ROW
    assert 0.5 <= min(timer.loop_times_ms(lambda: time.sleep(0.5e-3))) < 0.5 * NUM_CALLS_IN_A_ROW


@pytest.mark.parametrize(("others", "are_aligned"), [([0, 0], True), ([0, 1], False)])
def test_ranks_of_several_hosts_begin_after_a_barrier_only(timer, monkeypatch, others, are_aligned):
    """Their clocks differ by any part of a period, which would be counted."""

    def largest(tensor, op, group):
        tensor += torch.tensor(others)

    waits = []
    monkeypatch.setattr(stopwatch, "_wait_for_next_period", lambda: waits.append(1))
    monkeypatch.setattr(dist, "all_reduce", largest)
    RankTimer(dist.group.WORLD, "cpu").idle_times_ms(lambda: None, 1)
    assert bool(waits) == are_aligned


def test_ranks_of_a_host_begin_at_a_multiple_of_the_period(timer, monkeypatch):
    monkeypatch.setattr(stopwatch, "_START_PERIOD_NS", 5_000_000)
    begins = []
    timer.idle_times_ms(lambda: begins.append(time.monotonic_ns() % 5_000_000), 9)
    assert sorted(begins)[len(begins) // 2] < 1_000_000
