"""Published results beside predictions: held-out errors are within limits, and stay where they are."""

from __future__ import annotations

import json
from dataclasses import asdict
from importlib import resources

import pytest

from fusco.bench.simulation.laws import drawn_demand, grouped_gate
from fusco.bench.simulation.papers import PaperRow, check_papers, published_rows
from fusco.cli.explore.records import record_views
from fusco.core.topology import Topology
from fusco.placement import Balance
from fusco.simulate.cluster import load_cluster, names_of_clusters

RESIDUALS = json.loads((resources.files("fusco.bench.simulation") / "residuals.json").read_text())
TESTED = {row["id"] for row in published_rows() if row["role"] == "test"}

# Held-out rows, by the beginning and end of their ids, and the error in percent that they may have.
LIMITS = [
    ("fast.repo.", ".FAST", 3.0),
    ("fast.repo.", ".SpreadOut", 9.0),
    ("fusco.t3.real-world.FUSCO", "", 8.0),
    ("fusco.t3.real-world.dComm-off", "", 8.0),
    ("fusco.t3.real-world.planner-off", "", 8.0),
    ("fusco.t3.real-world.balancer-off", "", 9.0),  # the skew of the paper's trace is not known
    ("fast.a1", "", 1.0),
    ("h200x4.", "", 10.0),
    ("sockets.2x2.single-node", "", 10.0),
    ("sockets.2x2.uniform", "", 10.0),
    ("sockets.4x1.", "", 10.0),
    ("fuselink.", "", 5.0),
]


@pytest.mark.parametrize(("begin", "end", "limit"), LIMITS, ids=[f"{begin}{end}" for begin, end, _ in LIMITS])
def test_held_out_rows_are_within_their_limit(begin, end, limit):
    errors = {id_: RESIDUALS[id_] for id_ in TESTED if id_.startswith(begin) and id_.endswith(end)}
    assert errors
    assert {id_: error for id_, error in errors.items() if abs(error) > limit} == {}


def test_every_row_has_a_residual():
    assert {row["id"] for row in published_rows()} == set(RESIDUALS)


def test_residuals_are_where_they_were():
    """Those of FAST; ``fusco simulate --check papers`` has FUSCO's as well, which take longer."""
    rows = list(check_papers(["fast.", "fuselink.", "h200x4.zipf.", "sockets."]))
    assert len(rows) > 50
    assert [row.errors for row in rows if not row.is_right] == []


def test_a_residual_that_moved_is_told():
    row = {"label": "x", "where": "", "unit": "ms", "measured": 1, "predicted": 1.1, "error": 10.0, "role": "test"}
    assert PaperRow(**row, moved=0.9).is_right
    assert PaperRow(**row, moved=-1.1).errors == ("its error moved by -1.1 points, to +10.0 %",)


@pytest.mark.parametrize("name", names_of_clusters())
def test_no_constant_is_trained_on_a_row_that_is_held_out(name):
    trained = {id_ for constant in load_cluster(name).constants.values() for id_ in constant.trained}
    tested = {id_.removesuffix(".FAST").removesuffix(".SpreadOut") for id_ in TESTED} | TESTED
    assert trained & tested == set()


def test_a_gate_limits_nodes():
    topology = Topology.of_equal_nodes(8, 2)
    ids = grouped_gate(topology, 50, num_experts=32, num_topk=4, groups_of_token=2)[3]
    assert ids.shape == (50, 4)
    assert all(len(set(token)) == 4 and len({expert // 8 for expert in token}) <= 2 for token in ids.tolist())


def test_rows_drawn_by_law_have_their_mean():
    topology = Topology.of_equal_nodes(64, 8)
    even = drawn_demand(topology, 1000, 8, 2, is_skewed=False)
    expected = 64_000 * 8 * (1 - (1 - 1 / 8) ** 8)
    assert abs(even.node_rows.sum() / expected - 1) < 0.01
    skewed = drawn_demand(topology, 1000, 8, 2, is_skewed=True)
    assert skewed.num_tokens.std() > 500
    assert abs(skewed.expert_copies * skewed.node_rows.sum() / (8 * skewed.num_tokens.sum()) - 1) < 0.02


def test_json_lines_of_rows_are_shown_by_the_explorer():
    lines = [asdict(row) for row in check_papers([min(TESTED)])]
    (view,) = record_views(lines, Balance(2))
    assert view.kind == "predictions"
    assert [(row.label, row.measured) for row in view.rows] == [(line["label"], line["measured"]) for line in lines]
