"""Rows between nodes: by hand, and by fusco's planner."""

import numpy as np
import pytest
from workloads import workload

from fusco import BALANCERS
from fusco.bench.explain import plan_world
from fusco.bench.inputs.traffic import Trace, internode_rows_lower_bound
from fusco.bench.shuffle.summary import busiest_rows, internode_rows, num_copies

NAMES = ("fusco", "no-engine", "no-planner", "no-lanes", "no-balancer", "baseline")


def test_by_hand():
    # Experts 0 to 3 are node 0's, two to a rank. Every rank has the same two tokens.
    load = workload("trace", num_topk=3, trace=Trace(np.array([[0, 4, 6], [1, 2, 3]]), "by hand"))
    fusco, planner, baseline = (
        internode_rows(name, load, "static").tolist() for name in ("fusco", "no-planner", "baseline")
    )
    # From node 0 the first token leaves, for ranks 2 and 3; from node 1 both, the first for rank 0, the second for
    # both ranks.
    assert fusco == [[0, 0, 1, 0], [0, 0, 0, 1], [2, 0, 0, 0], [0, 2, 0, 0]]
    assert planner == [[0, 0, 2, 0], [0, 0, 0, 2], [3, 0, 0, 0], [0, 3, 0, 0]]
    assert baseline == [[0, 0, 1, 1], [0, 0, 1, 1], [2, 2, 0, 0], [2, 2, 0, 0]]
    # Copies: the first token goes to ranks 0, 2, 3, the second to ranks 0 and 1.
    assert num_copies(load) == 5


@pytest.mark.parametrize("pattern", ["uniform", "single-node", "imbalanced", "zipf"])
@pytest.mark.parametrize("balancer", list(BALANCERS))
def test_forwarded_rows_are_those_of_the_plans(pattern, balancer):
    load = workload(pattern, nodes=3, num_experts=18, tokens=40, num_topk=3)
    routings = [load.routing(rank) for rank in range(6)]
    plans = plan_world(routings, load.placement, load.topology, BALANCERS[balancer])
    expected = np.zeros((6, 6), np.int64)
    for plan in plans:
        received = plan.rank_lanes.received
        np.add.at(expected[:, plan.rank], received.carrier, received.num_rows)
    rows = internode_rows("fusco", load, balancer)
    assert rows.tolist() == expected.tolist()
    assert rows.sum() == internode_rows_lower_bound(load)
    assert (internode_rows("no-planner", load, balancer).sum(1) >= rows.sum(1)).all()
    assert busiest_rows(rows) == busiest_rows(rows.T)


def test_without_the_balancer_rows_stay_on_their_lane():
    rows = internode_rows("no-balancer", workload("imbalanced", tokens=50, num_topk=3), "send-and-receive")
    assert rows[[0, 1, 2, 3], [3, 2, 1, 0]].sum() == 0


def test_messages_of_a_fixed_size_have_a_row_for_every_token():
    load = workload("single-node", nodes=3, per_node=1, num_experts=9, tokens=20, num_topk=3)
    assert internode_rows("fusco-graph", load, "rotation", "cuda").tolist() == [[0, 20, 20], [20, 0, 20], [20, 20, 0]]
    assert internode_rows("fusco-static", load, "rotation", "cpu").sum() == internode_rows_lower_bound(load)


@pytest.mark.parametrize("name", NAMES)
def test_one_node_has_nothing_to_send(name):
    assert internode_rows(name, workload("uniform", nodes=1, per_node=4), "rotation").sum() == 0
