"""Max-min fair rates: by hand, against SimGrid, and what must hold for any flows."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from fusco.simulate.flows import Flows, run

ORACLE = Path(__file__).with_name("simgrid_oracle.py")


def flows_of(routes, num_bytes, weight=None, gates=None, starts=(), counts=(), delays=()) -> Flows:
    """Flows over given links; ``starts`` are pairs (gate, flow), ``counts`` the gate that each flow counts down."""
    num_flows, num_gates = len(routes), len(delays)
    ends = np.full((num_flows, 4), -1)
    ends[: len(counts), 0] = counts
    gate, flow = np.array(starts or np.zeros((0, 2)), np.int64).reshape(-1, 2).T
    order = np.argsort(gate, kind="stable")
    waiting = np.bincount(ends[:, 0][ends[:, 0] >= 0], minlength=num_gates)
    return Flows(
        first=np.append(0, np.cumsum([len(route) for route in routes])).astype(np.int64),
        links=np.array([link for route in routes for link in route], np.int64),
        sizes=np.array([num_bytes, weight or [1.0] * num_flows], np.float64),
        starts=(
            np.searchsorted(gate[order], np.arange(num_gates + 1)),
            flow[order],
            np.bincount(flow, minlength=num_flows),
        ),
        ends=ends,
        gates=np.array([waiting, delays], np.float64).reshape(2, -1),
        hop=np.zeros(num_flows, np.int64),
        src=np.zeros(num_flows, np.int64),
    )


def ends_of(capacity, routes, num_bytes, quantum=0.0, **options):
    table = SimpleNamespace(capacity=np.array(capacity, np.float64))
    return run(flows_of(routes, num_bytes, **options), table, quantum)


def test_three_flows_by_hand():
    """Link 0 (10) has flows 0 and 1, link 1 (4) flows 1 and 2: rates 8, 2, 2; then 10 and 4, when flow 1 has ended."""
    outcome = ends_of([10, 4], [[0], [0, 1], [1]], [80, 8, 20])
    assert outcome.end_us.tolist() == [8.8, 4.0, 7.0]
    assert outcome.link_bytes.tolist() == [88, 28]
    assert outcome.link_peak.tolist() == [10, 4]


def test_weights_divide_a_link():
    assert ends_of([10], [[0], [0]], [80, 20], weight=[4.0, 1.0]).end_us.tolist() == [10, 10]


def test_gates_open_after_their_delay():
    """Flow 1 starts 5 after flow 0; flow 2 has no bytes and ends when gate 0 opens."""
    outcome = ends_of([10], [[0], [0], [0]], [20, 10, 0], starts=[(0, 1), (0, 2)], counts=[0, -1, -1], delays=[5.0])
    assert outcome.start_us.tolist() == [0, 7, 7]
    assert outcome.end_us.tolist() == [2, 8, 7]


def test_flows_that_wait_for_each_other_are_found():
    with pytest.raises(ValueError, match="2 of 2 flows wait for each other"):
        ends_of([10], [[0], [0]], [1, 1], starts=[(0, 0), (1, 1)], counts=[1, 0], delays=[0.0, 0.0])


def test_a_flow_without_links_or_bytes_takes_no_time():
    assert ends_of([10], [[], [0]], [5, 0]).end_us.tolist() == [0, 0]


def random_problem(random, num_links, num_flows):
    capacity = random.uniform(1, 100, num_links)
    routes = [
        random.choice(num_links, random.integers(1, min(5, num_links + 1)), replace=False) for _ in range(num_flows)
    ]
    return capacity.tolist(), [route.tolist() for route in routes], random.integers(1, 1000, num_flows).tolist()


problems = st.tuples(st.integers(0, 2**32 - 1), st.integers(1, 12), st.integers(1, 40))


@settings(max_examples=60, deadline=None)
@given(problems, st.sampled_from([0.0, 0.3]))
def test_bytes_are_conserved_and_no_link_exceeds_its_capacity(problem, quantum):
    capacity, routes, num_bytes = random_problem(np.random.default_rng(problem[0]), *problem[1:])
    outcome = ends_of(capacity, routes, num_bytes, quantum)
    through = np.zeros(len(capacity))
    for route, size in zip(routes, num_bytes, strict=True):
        through[route] += size
    np.testing.assert_allclose(outcome.link_bytes, through)
    assert (outcome.link_peak <= np.array(capacity) * (1 + 1e-9)).all()
    np.testing.assert_allclose(outcome.samples.sum(axis=0), through, rtol=1e-6)
    assert outcome.samples.max(axis=0).max() / outcome.sample_us <= max(capacity) * (1 + 1e-6)
    assert outcome.makespan_us >= (through / capacity).max() * (1 - 1e-9)


@settings(max_examples=30, deadline=None)
@given(problems, st.floats(0.01, 100))
def test_more_bytes_take_as_many_times_longer(problem, factor):
    capacity, routes, num_bytes = random_problem(np.random.default_rng(problem[0]), *problem[1:])
    once = ends_of(capacity, routes, num_bytes).end_us
    scaled = ends_of(capacity, routes, [size * factor for size in num_bytes]).end_us
    np.testing.assert_allclose(scaled, once * factor, rtol=1e-8)


@settings(max_examples=30, deadline=None)
@given(problems)
def test_the_order_of_flows_does_not_matter(problem):
    random = np.random.default_rng(problem[0])
    capacity, routes, num_bytes = random_problem(random, *problem[1:])
    order = random.permutation(len(routes))
    mixed = ends_of(capacity, [routes[i] for i in order], [num_bytes[i] for i in order])
    np.testing.assert_allclose(mixed.end_us, ends_of(capacity, routes, num_bytes).end_us[order], rtol=1e-9)


@settings(max_examples=30, deadline=None)
@given(problems)
def test_rates_updated_less_often_are_hardly_slower(problem):
    capacity, routes, num_bytes = random_problem(np.random.default_rng(problem[0]), *problem[1:])
    exact = ends_of(capacity, routes, num_bytes)
    quantum = 1e-3 * exact.makespan_us
    coarse = ends_of(capacity, routes, num_bytes, quantum)
    assert coarse.num_updates <= exact.num_updates
    assert abs(coarse.makespan_us - exact.makespan_us) < 0.05 * exact.makespan_us


def python_with_simgrid() -> str:
    for python in (sys.executable, "/usr/bin/python3", shutil.which("python3")):
        if (
            python
            and subprocess.run([python, "-c", "import simgrid"], capture_output=True, check=False).returncode == 0
        ):
            return python
    return ""


def test_rates_are_those_of_simgrid():
    """25 random problems of up to 60 flows over up to 24 links."""
    if not (python := python_with_simgrid()):
        pytest.skip("SimGrid's Python bindings are not there: apt-get install python3-simgrid")
    random = np.random.default_rng(0)
    drawn = [random_problem(random, int(random.integers(2, 25)), int(random.integers(1, 61))) for _ in range(25)]
    asked = [dict(zip(("capacity", "routes", "num_bytes"), problem, strict=True)) for problem in drawn]
    done = subprocess.run(
        [python, ORACLE], input=json.dumps(asked), capture_output=True, text=True, timeout=120, check=True
    )
    answer = next(line for line in done.stdout.splitlines() if line.startswith("RESULT "))
    for problem, times in zip(drawn, json.loads(answer.removeprefix("RESULT ")), strict=True):
        np.testing.assert_allclose(ends_of(*problem).end_us, times, rtol=1e-9)
