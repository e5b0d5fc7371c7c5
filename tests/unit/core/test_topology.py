"""Topology of a group: nodes from sizes and from hosts."""

import pytest
from hypothesis import given, strategies as st

from fusco import Topology


def test_two_nodes_of_two():
    topology = Topology.of_equal_nodes(world_size=4, ranks_per_node=2)
    assert topology.rank_to_node == (0, 0, 1, 1)
    assert topology.rank_to_local == (0, 1, 0, 1)
    assert (topology.world_size, topology.num_nodes, topology.ranks_per_node) == (4, 2, 2)
    assert [topology.remote_nodes(rank) for rank in range(4)] == [(1,), (1,), (0,), (0,)]


def test_hosts_in_any_order_are_numbered_by_their_lowest_rank():
    topology = Topology.from_hosts(["z", "a", "m", "a", "m", "z"])
    assert topology.rank_to_node == (0, 1, 2, 1, 2, 0)
    assert topology.node_to_ranks == ((0, 5), (1, 3), (2, 4))
    assert topology.rank_to_local == (0, 0, 0, 1, 1, 1)


def test_one_host_can_play_several_nodes_but_no_node_spans_two_hosts():
    assert Topology.from_hosts(["a"] * 4, ranks_per_node=1).num_nodes == 4
    with pytest.raises(ValueError, match="node 1: rank 2 on a, rank 3 on b"):
        Topology.from_hosts(["a", "a", "a", "b"], ranks_per_node=2)


def test_uneven_nodes_are_refused_by_name():
    with pytest.raises(ValueError, match="node 0 has 2, node 1 has 1"):
        Topology.from_hosts(["a", "a", "b"])


@pytest.mark.parametrize("rank_to_node", [(), (1, 0), (0, 2), (-1,)])
def test_nodes_must_be_numbered_by_their_lowest_rank(rank_to_node):
    with pytest.raises(ValueError, match=r"at least one rank|numbered by their lowest rank"):
        Topology(rank_to_node)


@pytest.mark.parametrize(("world_size", "ranks_per_node"), [(4, 3), (4, 0), (4, -2), (0, 1), (2, 4)])
def test_sizes_that_do_not_divide(world_size, ranks_per_node):
    with pytest.raises(ValueError, match=f"ranks_per_node={ranks_per_node} does not divide .* {world_size} ranks"):
        Topology.of_equal_nodes(world_size, ranks_per_node)


@given(st.integers(1, 5), st.integers(1, 5), st.randoms(use_true_random=False))
def test_maps_agree(num_nodes, ranks_per_node, random):
    hosts = [f"host {node}" for node in range(num_nodes) for _ in range(ranks_per_node)]
    random.shuffle(hosts)
    topology = Topology.from_hosts(hosts)
    assert (topology.num_nodes, topology.ranks_per_node) == (num_nodes, ranks_per_node)
    for rank in range(topology.world_size):
        node, local = topology.rank_to_node[rank], topology.rank_to_local[rank]
        assert topology.node_to_ranks[node][local] == rank
        assert sorted({*topology.remote_nodes(rank), node}) == list(range(num_nodes))
