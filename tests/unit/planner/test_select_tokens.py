"""``select_tokens``: the tokens for each node, by hand and as the planner marks them."""

import pytest
import torch

from fusco.core.placement import ExpertPlacement
from fusco.core.topology import Topology
from fusco.planner.dispatch_plan import mark_destinations, select_tokens
from generator import number_of, random_of


def tokens_to_nodes(topk_idx, placement, topology):
    return [tokens.tolist() for tokens in select_tokens(torch.tensor(topk_idx), placement, topology).node_to_tokens]


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
    assert select_tokens(torch.empty(0, 3, dtype=torch.int64), placement, topology).num_tokens_to_node == (0, 0)
    assert select_tokens(torch.empty(5, 0, dtype=torch.int64), placement, topology).num_tokens_to_node == (0, 0)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_tokens_are_those_that_are_marked(dtype):
    topology = Topology((0, 1, 0, 1))
    for seed in range(20):
        num_experts = number_of(1, 9, seed, "experts")
        placement = ExpertPlacement.explicit([number_of(0, 3, seed, e) for e in range(num_experts)], world_size=4)
        shape = (number_of(0, 12, seed, "tokens"), number_of(0, 4, seed, "topk"))
        ids = torch.randint(-1, num_experts, shape, generator=random_of(seed, "ids"), dtype=dtype)
        marks = mark_destinations(ids, placement.membership_table(topology.rank_to_node, ids.device), 2)
        expected = [column.nonzero().squeeze(1).tolist() for column in marks.T]
        assert [tokens.tolist() for tokens in select_tokens(ids, placement, topology).node_to_tokens] == expected


def test_marks_for_ids_of_any_dtype():
    expert_to_part = torch.tensor([1, 0, -1])
    for dtype in (torch.int32, torch.int64):
        marks = mark_destinations(torch.tensor([[0, -1], [1, 0]], dtype=dtype), expert_to_part, 2)
        assert marks.tolist() == [[False, True], [True, True]]
