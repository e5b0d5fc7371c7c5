"""The benchmark's baseline, and its variants without engine or planner, satisfy the same specification."""

from __future__ import annotations

import pytest
from ablation_jobs import check_baseline, check_no_engine, check_no_planner, differ_from_plan
from rank_setup import Setup

from fusco import ExpertPlacement, Topology
from fusco.bench.inputs.traffic import Workload

pytestmark = [pytest.mark.multirank, pytest.mark.cpu_only]


@pytest.mark.parametrize("ranks_per_node", [1, 2])
@pytest.mark.parametrize("balancer", ["rotation", "send-and-receive"])
def test_without_the_engine(world, ranks_per_node, balancer):
    world.run(check_no_engine, 4, Setup(ranks_per_node=ranks_per_node, balancer=balancer))


def test_without_the_engine_on_other_placements(world):
    world.run(check_no_engine, 4, Setup(ranks_per_node=2, expert_placement=(3, 0, 0, 1) * 6))  # none on rank 2
    world.run(check_no_engine, 4, Setup(ranks_per_node=4))  # one node


@pytest.mark.parametrize("expert_placement", [None, (3, 0, 0, 1) * 6], ids=["contiguous", "none on rank 2"])
def test_the_baseline(world, expert_placement):
    world.run(check_baseline, 4, Setup(ranks_per_node=2, expert_placement=expert_placement))


@pytest.mark.parametrize("ranks_per_node", [1, 2])
def test_without_the_planner(world, ranks_per_node):
    world.run(check_no_planner, 4, Setup(ranks_per_node=ranks_per_node))


@pytest.mark.parametrize("pattern", ["uniform", "imbalanced"])
def test_each_rank_sends_between_nodes_what_is_computed_for_it(world, pattern):
    workload = Workload(
        pattern=pattern,
        topology=Topology.of_equal_nodes(6, 2),
        placement=ExpertPlacement.contiguous(24, 6),
        tokens=50,
        hidden=4,
        num_topk=4,
    )
    for balancer in ("rotation", "send-and-receive"):
        assert world.run(differ_from_plan, 6, workload, balancer) == [[0, 0]] * 6
