"""Bytes that a plan moves, by hand; ``test_world`` compares with brute force."""

import torch

from fusco.bench.explain import plan_cost, plan_world
from fusco.core.placement import ExpertPlacement
from fusco.core.topology import Topology
from fusco.planner.balancer import balance_static
from fusco.planner.routing import Routing


def test_two_nodes_of_two_ranks():
    # Rank r owns expert r. Rank 0 has three tokens, rank 2 one, the others none.
    topk_idx = [[[2, 3], [0, 1], [0, 2]], [], [[2, 0]], []]
    routings = [Routing(torch.tensor(ids, dtype=torch.int64).view(-1, 2), torch.ones(len(ids), 2)) for ids in topk_idx]
    plans = plan_world(routings, ExpertPlacement.contiguous(4, 4), Topology((0, 0, 1, 1)), balance_static)
    costs = [plan_cost(plan, bytes_per_token=10) for plan in plans]

    assert [cost.internode_send_bytes for cost in costs] == [20, 0, 10, 0]  # tokens 0 and 2; token 0
    assert [cost.metadata_bytes for cost in costs] == [2 * 2 * 8, 0, 2 * 8, 0]  # an id and a float32 for each expert
    assert [cost.internode_bytes_avoided for cost in costs] == [10, 0, 0, 0]  # token 0 goes to both ranks of node 1
    assert [cost.intranode_bytes for cost in costs] == [0, 10, 0, 10]
