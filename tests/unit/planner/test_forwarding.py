"""Level 1: the tokens for each node."""

import torch

from fusco.core.placement import ExpertPlacement
from fusco.core.topology import Topology
from fusco.planner.forwarding import mark_destinations, plan_forwarding


def tokens_to_nodes(topk_idx, placement, topology):
    return [tokens.tolist() for tokens in plan_forwarding(torch.tensor(topk_idx), placement, topology).node_to_tokens]


def test_each_node_gets_one_copy_of_a_token_for_any_number_of_experts():
    # Experts 0 to 3 on node 0 (ranks 0, 1), 4 to 7 on node 1 (ranks 2, 3).
    placement, topology = ExpertPlacement.contiguous(8, 4), Topology((0, 0, 1, 1))
    topk_idx = [[4, 5, 6], [0, 7, 1], [2, 3, 2], [-1, -1, 7]]
    assert tokens_to_nodes(topk_idx, placement, topology) == [[1, 2], [0, 1, 3]]


def test_nodes_of_scattered_ranks():
    placement, topology = ExpertPlacement.contiguous(4, 4), Topology((0, 1, 0, 1))
    assert tokens_to_nodes([[0, 2], [1, -1], [2, 3]], placement, topology) == [[0, 2], [1, 2]]


def test_no_tokens_and_no_experts_per_token():
    placement, topology = ExpertPlacement.contiguous(4, 2), Topology((0, 1))
    assert plan_forwarding(torch.empty(0, 3, dtype=torch.int64), placement, topology).num_tokens_to_node == (0, 0)
    assert plan_forwarding(torch.empty(5, 0, dtype=torch.int64), placement, topology).num_tokens_to_node == (0, 0)


def test_the_dtype_of_ids_makes_no_difference():
    expert_to_part = torch.tensor([1, 0, -1])
    for dtype in (torch.int32, torch.int64):
        marks = mark_destinations(torch.tensor([[0, -1], [1, 0]], dtype=dtype), expert_to_part, 2)
        assert marks.tolist() == [[False, True], [True, True]]
