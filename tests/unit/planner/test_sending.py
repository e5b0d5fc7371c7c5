"""Order of slices: by the stages of a schedule, every slice once, the same order on all nodes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from fusco import Settings, Topology, Traffic
from fusco.planner.sending import SendingStage, in_proportion, order_of_slices, plan_stages

TOPOLOGY = Topology.of_equal_nodes(world_size=6, ranks_per_node=2)


def traffic_of(node_rows):
    """Traffic in which the first rank of each node sends two thirds of its rows."""
    rows = np.array(node_rows)
    first = rows * 2 // 3
    return Traffic(TOPOLOGY, np.stack([first, rows - first], axis=1))


def test_stages_by_hand():
    # Node 0 sends 6 rows to node 1 and 3 to node 2, and so on around: two stages, in which all are busy.
    traffic = traffic_of([[0, 6, 3], [3, 0, 6], [6, 3, 0]])
    for node in range(3):
        stages = plan_stages(traffic, node)
        assert sorted((stage.dst_node - node) % 3 for stage in stages) == [1, 2]
        assert {(stage.dst_node - node) % 3: stage.num_rows for stage in stages} == {1: 6, 2: 3}


def test_no_two_nodes_send_to_one_in_the_same_stage():
    traffic = traffic_of([[0, 4, 4], [4, 0, 4], [4, 4, 0]])
    first = [plan_stages(traffic, node)[0].dst_node for node in range(3)]
    assert sorted(first) == [0, 1, 2]


def test_nothing_to_send():
    assert plan_stages(traffic_of(np.zeros((3, 3), np.int64)), 1) == ()
    assert order_of_slices({0: 0, 2: 0}, []) == []


def test_a_rank_with_no_slices_for_a_node_that_other_ranks_send_to():
    stages = [SendingStage(1, 10), SendingStage(2, 10)]
    assert order_of_slices({1: 0, 2: 3}, stages) == [2, 2, 2]


@given(st.data())
def test_every_slice_is_sent_once(data):
    node_rows = data.draw(st.lists(st.integers(0, 50), min_size=9, max_size=9).map(lambda x: np.reshape(x, (3, 3))))
    np.fill_diagonal(node_rows, 0)
    stages = plan_stages(traffic_of(node_rows), 0)
    num_slices = {n: data.draw(st.integers(0, 9)) if node_rows[0, n] else 0 for n in (1, 2)}
    order = order_of_slices(num_slices, stages)
    assert {n: order.count(n) for n in (1, 2)} == num_slices


def test_an_invalid_order_is_rejected():
    with pytest.raises(ValueError, match="slice_order must be 'in-turn' or 'staged', got 'random'"):
        Settings(slice_order="random")


@given(flow=st.lists(st.integers(0, 4), max_size=40))
def test_at_any_time_all_flows_have_sent_the_same_share_but_for_a_slice(flow):
    flow = np.array(flow, np.int64)
    order = in_proportion(flow)
    assert sorted(order.tolist()) == list(range(len(flow)))
    totals = np.bincount(flow, minlength=5)
    for num_sent in range(len(flow) + 1):
        sent = np.bincount(flow[order[:num_sent]], minlength=5)
        late, early = (sent[totals > 0] + 1) / totals[totals > 0], (sent[totals > 0] - 1) / totals[totals > 0]
        assert not len(late) or late.min() >= early.max()
    for each in range(5):  # slices of a flow stay in order
        assert (np.diff(order[flow[order] == each]) > 0).all()
