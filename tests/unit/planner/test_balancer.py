"""Balancers: valid, deterministic, close to the optimum, and fast."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, strategies as st

from fusco import BALANCERS, Groups, Lanes, Topology, Traffic
from fusco.planner.balancer import balance_by_rotation, balance_send_and_receive, balance_static, checked_balancer
from timing import relative_time

OF_GROUPS = {name: balance for name, balance in BALANCERS.items() if name != "lanes"}


def traffic_of(num_rows) -> Traffic:
    num_nodes, ranks_per_node, _ = np.shape(num_rows)
    rows = np.array(num_rows, dtype=np.int64)
    rows[range(num_nodes), :, range(num_nodes)] = 0
    return Traffic(Topology.of_equal_nodes(num_nodes * ranks_per_node, ranks_per_node), rows)


def random_traffic(num_nodes: int, ranks_per_node: int, seed: int) -> Traffic:
    random = np.random.default_rng([num_nodes, ranks_per_node, seed])
    loads = random.beta(0.2, 0.2, (num_nodes, ranks_per_node, 1)) * 1000
    return traffic_of(loads * random.random((num_nodes, ranks_per_node, num_nodes)))


def bimodal_traffic(num_nodes: int, ranks_per_node: int, num_draws: int) -> list[Traffic]:
    """Loads of each rank drawn from Beta(0.2, 0.2): most ranks send nearly everything or nearly nothing."""
    random = np.random.default_rng(0)
    loads = random.beta(0.2, 0.2, (num_draws, num_nodes, ranks_per_node)) * 100_000
    per_node = np.repeat(loads[..., None], num_nodes, axis=-1) / max(1, num_nodes - 1)
    return [traffic_of(rows) for rows in per_node]


def largest_load(traffic: Traffic, groups: Groups) -> int:
    return int(traffic.group_loads(groups).max())


def least_largest_load(traffic: Traffic) -> int:
    """Try every grouping; the order of node 0 is fixed, since groups are interchangeable."""
    loads, ranks_per_node = traffic.rank_loads, traffic.topology.ranks_per_node
    sums = loads[:1]
    for node in loads[1:]:
        orders = np.array([node[list(order)] for order in itertools.permutations(range(ranks_per_node))])
        sums = (sums[:, None] + orders[None]).reshape(-1, ranks_per_node)
    return int(sums.max(axis=1).min())


def test_loads_by_hand():
    # Node 0's ranks send 9 and 1 rows to node 1, whose ranks send back 8 and 2.
    topology = Topology.of_equal_nodes(4, 2)
    traffic = Traffic.from_counts(topology, [[7, 9], [7, 1], [8, 7], [2, 7]])  # sevens do not count
    assert traffic.rank_loads.tolist() == [[9, 1], [8, 2]]
    static, crossed = Groups(topology, ((0, 0), (1, 1))), Groups(topology, ((0, 1), (1, 0)))
    assert traffic.group_loads(static).tolist() == [17, 3]
    assert traffic.group_loads(crossed).tolist() == [11, 9]
    assert traffic.received_rows(static).tolist() == [[8, 9], [2, 1]]  # by group and node
    assert traffic.received_rows(crossed).tolist() == [[2, 9], [8, 1]]
    assert balance_static(traffic) == static
    assert balance_by_rotation(traffic) == balance_send_and_receive(traffic) == crossed


def test_rotation_is_the_papers_algorithm():
    # Sorted by load, node 0 has ranks 2, 0, 1; node 1 (1, 2, 0) starts one later, node 2 (0, 1, 2) two later.
    loads = np.array([[5, 1, 9], [2, 8, 4], [7, 6, 3]])
    traffic = traffic_of(np.repeat(loads[..., None], 3, axis=2))
    assert balance_by_rotation(traffic).group_to_locals == ((2, 2, 2), (0, 0, 0), (1, 1, 1))


def test_ranks_of_nodes_that_interleave():
    topology = Topology((0, 1, 0, 1))
    traffic = Traffic.from_counts(topology, [[0, 9], [8, 0], [0, 1], [2, 0]])
    assert traffic.rank_loads.tolist() == [[9, 1], [8, 2]]


@pytest.mark.parametrize("name", OF_GROUPS)
@given(num_nodes=st.integers(1, 5), ranks_per_node=st.integers(1, 8), data=st.data())
def test_any_traffic_yields_a_partition_and_always_the_same(name, num_nodes, ranks_per_node, data):
    shape = (num_nodes, ranks_per_node, num_nodes)
    size = num_nodes * ranks_per_node * num_nodes
    rows = data.draw(st.lists(st.integers(0, data.draw(st.sampled_from([0, 1, 50]))), min_size=size, max_size=size))
    traffic = traffic_of(np.reshape(rows, shape))
    before = traffic.num_rows.copy()
    groups = BALANCERS[name](traffic)  # the constructor of Groups rejects anything but a partition
    assert groups == BALANCERS[name](traffic_of(before))
    assert np.array_equal(traffic.num_rows, before)


# Largest group load over the minimum, worst of 300 draws: measured 1.0, 1.060, 1.0 and 1.096. With two nodes, pairing
# heaviest with lightest is optimal.
@pytest.mark.parametrize(
    ("num_nodes", "ranks_per_node", "factor"), [(2, 3, 1.0), (3, 3, 1.10), (2, 4, 1.0), (3, 4, 1.10)]
)
def test_loads_are_close_to_the_optimum(num_nodes, ranks_per_node, factor):
    ratios = []
    for seed in range(300):
        traffic = random_traffic(num_nodes, ranks_per_node, seed)
        ratios.append(largest_load(traffic, balance_send_and_receive(traffic)) / least_largest_load(traffic))
    assert min(ratios) >= 1.0
    assert max(ratios) <= factor
    assert np.mean(ratios) <= 1.01


def test_send_and_receive_sends_and_receives_more_evenly_than_the_others():
    draws = [random_traffic(4, 8, seed) for seed in range(200)]
    max_sent, max_received = {}, {}
    for name, balance in OF_GROUPS.items():
        groups = [balance(traffic) for traffic in draws]
        max_sent[name] = np.mean([largest_load(*pair) for pair in zip(draws, groups, strict=True)])
        received = [traffic.received_rows(chosen) for traffic, chosen in zip(draws, groups, strict=True)]
        max_received[name] = np.mean([rows.max() for rows in received])
        assert all(r.sum() == traffic.num_rows.sum() for r, traffic in zip(received, draws, strict=True))
    assert min(max_sent, key=max_sent.get) == min(max_received, key=max_received.get) == "send-and-receive"


# Largest over mean group load, median of 1,000 draws.
@pytest.mark.parametrize(
    ("num_nodes", "static", "rotation", "best"), [(2, 1.78, 1.91, 1.30), (4, 1.56, 1.66, 1.14), (8, 1.42, 1.16, 1.07)]
)
def test_medians_on_bimodal_loads(num_nodes, static, rotation, best):
    draws = bimodal_traffic(num_nodes, 8, 1000)

    def median(balancer):
        loads = [traffic.group_loads(balancer(traffic)) for traffic in draws]
        return np.median([load.max() / load.mean() for load in loads])

    assert median(balance_static) == pytest.approx(static, abs=0.06)
    assert median(balance_by_rotation) == pytest.approx(rotation, abs=0.06)
    assert median(balance_send_and_receive) <= best


def test_balancing_eight_nodes_of_eight_takes_less_than_100_us():
    draws = [random_traffic(8, 8, seed) for seed in range(50)]
    assert relative_time(balance_send_and_receive, draws) < 29  # loops of 3.4 us on an idle AMD EPYC


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        (((0, 1), (1, 0)), TypeError, "a balancer must return Groups or Lanes, got tuple from balance_badly"),
        (None, TypeError, "got NoneType"),
        (Groups.of_same_local_rank(Topology.of_equal_nodes(2, 2)), ValueError, "balance_badly returned groups of Top"),
        (Lanes.of_runs(Topology.of_equal_nodes(2, 1), []), ValueError, "balance_badly returned lanes of Top"),
        (
            Lanes.of_runs(Topology.of_equal_nodes(4, 2), [(1, 1, 0, 3, 0, 2)]),
            ValueError,
            "returned lanes with 3 rows of rank 1 for node 1, which needs 0",
        ),
    ],
)
def test_a_balancer_must_return_groups_or_lanes_of_the_traffic(given, error, words):
    def balance_badly(_):
        return given

    topology = Topology.of_equal_nodes(4, 2)
    traffic = Traffic(topology, np.zeros((2, 2, 2), np.int64))
    assert checked_balancer(balance_static)(traffic) == Groups.of_same_local_rank(topology)
    with pytest.raises(error, match=words):
        checked_balancer(balance_badly)(traffic)
