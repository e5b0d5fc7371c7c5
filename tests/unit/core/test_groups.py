"""Communication groups: one rank of every node."""

import pytest
from hypothesis import given, strategies as st

from fusco import Groups, Topology

TWO_BY_TWO = Topology((0, 0, 1, 1))


def test_forwarders_are_members_of_the_senders_group():
    groups = Groups(TWO_BY_TWO, ((0, 1), (1, 0)))  # ranks 0 and 3, ranks 1 and 2
    assert groups.rank_to_group == (0, 1, 1, 0)
    assert [groups.forwarder(rank, 1) for rank in (0, 1)] == [3, 2]
    assert [groups.forwarder(rank, 0) for rank in (2, 3)] == [1, 0]


def test_the_static_grouping_takes_equal_local_ranks():
    assert Groups.of_same_local_rank(Topology((0, 1, 0, 1))).rank_to_group == (0, 0, 1, 1)


@pytest.mark.parametrize(
    "group_to_locals", [((0, 0), (0, 1)), ((0, 1),), ((0, 0), (1, 1), (0, 0)), ((0, 2), (1, 0)), ((0, 0), (1, -1))]
)
def test_groups_that_do_not_take_each_rank_once(group_to_locals):
    with pytest.raises(ValueError, match=r"do not take each rank of node \d exactly once"):
        Groups(TWO_BY_TWO, group_to_locals)


@given(st.integers(1, 4), st.integers(1, 5), st.randoms(use_true_random=False))
def test_forwarding_goes_both_ways(num_nodes, ranks_per_node, random):
    topology = Topology.of_equal_nodes(num_nodes * ranks_per_node, ranks_per_node)
    orders = [random.sample(range(ranks_per_node), ranks_per_node) for _ in range(num_nodes)]
    groups = Groups(topology, tuple(zip(*orders, strict=True)))
    for src in range(topology.world_size):
        assert groups.forwarder(src, topology.rank_to_node[src]) == src
        for node in topology.remote_nodes(src):
            forwarder = groups.forwarder(src, node)
            assert topology.rank_to_node[forwarder] == node
            assert groups.forwarder(forwarder, topology.rank_to_node[src]) == src
