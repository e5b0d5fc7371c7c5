"""Cost model, choice of mode, and FAST's bounds compared with the costs of schedules."""

from __future__ import annotations

import numpy as np
import pytest

from fusco import Topology
from fusco.schedule import Links, choose_mode, decompose, make_schedule, schedule_us, spread_out, stages_us
from matrices import families
from worst_case import adversarial_bytes, optimal_us, worst_case_ratio, worst_case_us

NO_LATENCY = Links(latency_us=0)


def test_a_schedule_by_hand():
    # Two nodes of two ranks; rank 0 has 8000 bytes for rank 3, and 4500 for rank 1. It gives rank 1 4000 bytes (4 us at
    # 1 GB/s); both send 4000 (40 us at 0.1 GB/s) in a stage (5 us); those of lane 0 are forwarded to rank 3 (4 us).
    rank_bytes = np.zeros((4, 4), np.int64)
    rank_bytes[0, 3], rank_bytes[0, 1] = 8000, 4500
    schedule = make_schedule(rank_bytes, Topology.of_equal_nodes(4, 2))
    links = Links(latency_us=5, internode_gbs=0.1, intranode_gbs=1)
    assert schedule_us(schedule, links) == pytest.approx(4 + 5 + 40 + 4)
    assert stages_us(schedule.stages, 2, links) == pytest.approx(45)
    # Local messages that take longer than the stage delay the redistribution after them.
    rank_bytes[0, 1] = 60_000
    assert schedule_us(make_schedule(rank_bytes, schedule.topology), links) == pytest.approx(4 + 60 + 4)


@pytest.mark.parametrize("num_nodes", [4, 8, 16, 40])
def test_the_chosen_mode_is_at_most_a_tenth_slower_than_the_other(num_nodes):
    # The choice depends on the size of the matrix only, so it may cost a few stages between 1000 and 1e9 bytes.
    for name in ("uniform", "zipf 0.9", "uniform, equal sums"):
        for scale in (1, 10, 100, 1000, 10_000):
            matrix = families(num_nodes)[name] * scale
            cost = {mode: stages_us(decompose(matrix, mode=mode), 8, Links()) for mode in ("exact", "few")}
            assert cost[choose_mode(matrix, 8, Links())] <= 1.1 * min(cost.values()), (name, scale)


def test_small_traffic_uses_few_stages_and_zero_latency_exact():
    matrix = families(16)["uniform"]
    assert choose_mode(matrix, 8, Links()) == "few"
    assert choose_mode(matrix, 8, NO_LATENCY) == "exact"
    assert choose_mode(np.zeros((4, 4), np.int64), 8, Links()) in ("exact", "few")


@pytest.mark.parametrize(("num_nodes", "ranks_per_node"), [(2, 2), (4, 1), (3, 4), (3, 8), (4, 8), (8, 8), (16, 8)])
@pytest.mark.parametrize("mode", ["exact", "few"])
def test_theorem_3_on_its_adversarial_workload(num_nodes, ranks_per_node, mode):
    topology = Topology.of_equal_nodes(num_nodes * ranks_per_node, ranks_per_node)
    schedule = make_schedule(adversarial_bytes(topology, 10**9), topology, mode=mode)
    node_bytes = schedule.stages.node_bytes()
    optimum = optimal_us(node_bytes, ranks_per_node, NO_LATENCY)
    worst = worst_case_us(node_bytes, ranks_per_node, NO_LATENCY)
    cost = schedule_us(schedule, NO_LATENCY)
    limit = optimum * worst_case_ratio(topology, NO_LATENCY) * (1 + 1e-9)
    assert optimum <= cost <= limit
    assert worst <= limit
    if num_nodes >= ranks_per_node / 2:  # fewer nodes: see the next test
        assert cost <= worst * (1 + 1e-9)


def test_the_proof_omits_that_one_rank_may_receive_the_whole_last_stage():
    topology = Topology.of_equal_nodes(16, 8)
    schedule = make_schedule(adversarial_bytes(topology, 10**9), topology)
    ratio = schedule_us(schedule, NO_LATENCY) / optimal_us(schedule.stages.node_bytes(), 8, NO_LATENCY)
    assert ratio == pytest.approx(1 + 14 / 9)  # 7 to balance and 7 to redistribute, 9 times faster than between nodes
    assert worst_case_ratio(topology, NO_LATENCY) == pytest.approx(1 + 12 / 9)


def test_random_loads_are_far_from_the_worst_case():
    random = np.random.default_rng(0)
    topology = Topology.of_equal_nodes(32, 8)
    schedule = make_schedule(random.integers(0, 10**8, (32, 32)), topology)
    optimum = optimal_us(schedule.stages.node_bytes(), 8, NO_LATENCY)
    assert schedule_us(schedule, NO_LATENCY) < 1.1 * optimum < optimum * worst_case_ratio(topology, NO_LATENCY)


def test_spread_out_is_never_shorter():
    for num_nodes in (2, 5, 8):
        for matrix in families(num_nodes).values():
            assert spread_out(matrix).total_bytes >= decompose(matrix).total_bytes


def test_invalid_links_are_rejected():
    with pytest.raises(ValueError, match="internode_gbs must be above zero, got 0"):
        Links(internode_gbs=0)
    with pytest.raises(ValueError, match="latency_us must not be negative, got nan"):
        Links(latency_us=float("nan"))


@pytest.mark.parametrize(("ranks_per_node", "error"), [(0, ValueError), (1.5, TypeError)])
def test_ranks_per_node_is_validated(ranks_per_node, error):
    with pytest.raises(error, match=f"ranks_per_node must be .*, got {ranks_per_node}"):
        choose_mode(np.ones((2, 2), np.int64), ranks_per_node, Links())
    with pytest.raises(error, match=f"ranks_per_node must be .*, got {ranks_per_node}"):
        stages_us(decompose([[0, 1], [1, 0]]), ranks_per_node, Links())
