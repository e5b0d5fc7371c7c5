"""Views of plans: numbers agree with the planner's, titles say the finding."""

import re

import numpy as np
import pytest
import torch
from explored import BYTES_PER_ROW, drawn_dispatch, large_dispatch

from fusco.cli.explore.stages import stage_views
from fusco.cli.explore.traffic import (
    MAX_CELLS,
    Dispatch,
    copies_of,
    copies_view,
    experts_view,
    links_view,
    matrix_view,
    node_matrix,
)
from fusco.core.placement import ExpertPlacement
from fusco.core.topology import Topology
from fusco.placement import Balance
from fusco.planner.balancer import BALANCERS
from fusco.schedule import Links, lower_bound_bytes


@pytest.fixture(scope="module")
def drawn():
    return drawn_dispatch(4, 4)


def test_copies_are_counted_by_hand():
    """Rank 0 has a token with two experts of node 1, and one with an expert of each node; -1 is none."""
    topology = Topology.of_equal_nodes(4, 2)
    ids = [torch.tensor([[4, 5], [0, 7], [-1, -1]]), *[torch.zeros((0, 2), dtype=torch.int64)] * 3]
    dispatch = Dispatch.of_routings(ids, ExpertPlacement.contiguous(8, 4), topology, 10)
    assert dispatch.copies.tolist() == [[0, 0, 2, 1], [0] * 4, [0] * 4, [0] * 4]
    view = copies_view(dispatch)
    assert [bar.rows for bar in view.bars] == [3, 2, 2]
    assert view.title == "One copy per node, not per expert, takes 33 % off the network: 10 B a dispatch"
    assert view.tokens == 3


def test_without_duplicates_the_title_says_so():
    assert copies_of(5, 5, 5, 5, 2).title.startswith("Nothing is deduplicated")


def test_the_matrix_agrees_with_routing_and_lanes(drawn):
    dispatch, ids, placement = drawn
    view = matrix_view(dispatch, "lanes")
    owners = np.array(placement.expert_to_rank)
    before = np.zeros((16, 16), np.int64)
    for rank, of_rank in enumerate(ids):
        np.add.at(before[rank], owners[of_rank.numpy().ravel()], 1)
    within = np.arange(16)[:, None] // 4 == np.arange(16) // 4
    assert np.array_equal(view.before, np.where(within, 0, before))
    after = np.array(view.after)
    assert after.sum() == dispatch.traffic.num_rows.sum()
    assert not after[within].any()
    assert after.max(axis=1).sum() > 0


def test_links_agree_with_each_balancer(drawn):
    dispatch, *_ = drawn
    view = links_view(dispatch, "lanes")
    assert view.balancers[-1].is_chosen
    assert {each.name for each in view.balancers} == set(BALANCERS)
    for each in view.balancers:
        lanes = dispatch.traffic.lanes_of(BALANCERS[each.name](dispatch.traffic))
        assert each.sends == lanes.sent_rows.tolist()
        assert each.receives == lanes.received_rows.tolist()
        assert each.over_bound == pytest.approx(lanes.most_rows / dispatch.traffic.bound, abs=1e-4)
    static, lanes = (next(each for each in view.balancers if each.name == name) for name in ("static", "lanes"))
    before, after = map(float, re.fullmatch(r"Lanes bring .* from (.*) to (.*) of the bound", view.title).groups())
    assert before == pytest.approx(static.over_bound, abs=0.05)
    assert after == pytest.approx(lanes.over_bound, abs=0.005)


def test_a_chosen_balancer_that_brings_nothing_is_no_finding(drawn):
    title = links_view(drawn[0], "static").title
    assert re.fullmatch(r"The busiest NIC carries [\d.]+ of the bound with static", title)


@pytest.mark.parametrize(("nodes", "ranks"), [(64, 8), (300, 1), (1250, 8), (140, 72)])
def test_many_ranks_are_nodes_or_blocks_of_nodes(nodes, ranks):
    dispatch = large_dispatch(nodes, ranks)
    view = matrix_view(dispatch, "lanes")
    assert view.cell == "node"
    assert len(view.before) == -(-nodes // view.nodes_per_cell) <= MAX_CELLS
    assert np.sum(view.before) == dispatch.copies.sum()
    assert np.sum(view.after) == dispatch.node_rows.sum()
    if view.ranks_after:
        of_node = np.array(view.ranks_after).reshape(nodes, ranks, -1).sum(axis=1)
        assert np.array_equal(of_node, view.after)
    assert bool(view.ranks_after) == (nodes == 64)


def test_rows_of_ranks_are_there_only_where_cells_are_single_nodes():
    rows = np.ones((300, 300), np.int64)
    assert node_matrix(rows, rows, 1, 2, (rows, rows)).ranks_after == []


def test_nothing_between_nodes_is_said():
    view = node_matrix(np.zeros((2, 2), np.int64), np.zeros((2, 2), np.int64), 1, 2)
    assert view.title == "Nothing crosses between nodes"


def test_experts_by_hand():
    """Two ranks of two experts: rank 0 has 80 rows of 100, and gives 30 of its largest expert away."""
    rows = [np.array([50, 30, 10, 10]), np.array([25, 25, 25, 25])]
    view = experts_view(rows, ExpertPlacement.contiguous(4, 2), 2, Balance(1, tolerance=0), [3, 4], 2)
    assert view.before == [[80, 20], [50, 50]]
    assert view.after == [[50, 50], [50, 50]]
    assert (view.ratio_before, view.ratio_after, view.copies) == ([1.6, 1.0], [1.0, 1.0], [1, 0])
    assert view.title == (
        "In layer 3 the busiest rank computes 1.6 times the mean; 1 spare place a rank brings every layer to 1.00 "
        "at most"
    )


def test_experts_without_spare_places_are_only_told():
    view = experts_view([np.array([3, 1])], ExpertPlacement.contiguous(2, 2), 2, Balance(0), [0], 2)
    assert view.title == "The busiest rank computes 1.5 times the mean"
    assert view.before == view.after


def test_stages_send_every_byte_one_to_one_and_end_near_the_bound(drawn):
    node_bytes = drawn[0].node_rows * BYTES_PER_ROW
    links = Links(latency_us=5.0, internode_gbs=50.0)
    timeline, replay = stage_views(node_bytes, 4, links)
    sent = np.zeros_like(node_bytes, dtype=float)
    lasted = np.array(replay.end_us) - np.array(replay.begin_us)
    np.add.at(sent, (replay.src, replay.dst), lasted * np.array(replay.gbs) * 1e3)
    assert sent == pytest.approx(node_bytes, rel=1e-3)
    for at in np.linspace(0, replay.total_us, 97):
        is_now = (np.array(replay.begin_us) <= at) & (at < np.array(replay.end_us))
        for ends in (replay.src, replay.dst):
            chosen = np.array(ends)[is_now]
            assert len(chosen) == len(set(chosen.tolist()))
    assert timeline.bound_us == pytest.approx(lower_bound_bytes(node_bytes) / 4 / 50e3, rel=1e-3)
    stages = len(timeline.marks_us)
    assert timeline.total_us <= (1.02 * timeline.bound_us + 5.0 * stages) * 1.01
    assert timeline.title.startswith(f"{stages} one-to-one stages take ")


def test_no_stages_without_traffic_or_of_too_many_nodes():
    assert stage_views(np.zeros((2, 2), np.int64), 1, Links()) == []
    assert stage_views(np.ones((257, 257), np.int64), 1, Links()) == []
