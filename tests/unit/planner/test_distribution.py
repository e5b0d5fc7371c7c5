"""Level 2: the slots of each row."""

import torch

from fusco.core.placement import ExpertPlacement
from fusco.core.topology import Topology
from fusco.planner.distribution import NodeRouting, distribute, mark_local_ranks

PLACEMENT = ExpertPlacement.contiguous(num_experts=4, world_size=2)


def node_routing(topk_idx, src_to_first_row):
    return NodeRouting(torch.tensor(topk_idx), None, src_to_first_row)


def test_blocks_in_order_of_expert_and_rows_in_order_of_source_and_token():
    routing = node_routing([[1, 0], [1, 2], [0, -1], [3, 1]], (0, 2, 4))
    plan = distribute(routing, PLACEMENT, rank=0)
    # Expert 0 takes rows 0 and 2, expert 1 rows 0, 1 and 3.
    assert plan.pair_to_row.tolist() == [0, 0, 1, 2, 3]
    assert plan.pair_to_k.tolist() == [0, 1, 0, 0, 1]
    assert plan.pair_to_slot.tolist() == [2, 0, 3, 1, 4]
    assert plan.num_rows_per_expert.tolist() == [2, 3]
    assert plan.padding_slots.tolist() == []


def test_alignment_rounds_every_block_up():
    routing = node_routing([[1, 0], [1, 2], [0, -1], [3, 1]], (0, 2, 4))
    plan = distribute(routing, PLACEMENT, rank=0, expert_alignment=4)
    assert plan.block_to_first_slot == (0, 4, 8)
    assert plan.pair_to_slot.tolist() == [4, 0, 5, 1, 6]
    assert plan.num_rows_per_expert.tolist() == [2, 3]
    assert plan.padding_slots.tolist() == [2, 3, 7]


def test_an_expert_without_rows_has_an_empty_block_at_any_alignment():
    plan = distribute(node_routing([[1, -1]], (0, 1, 1)), PLACEMENT, rank=0, expert_alignment=8)
    assert plan.block_to_first_slot == (0, 0, 8)
    assert plan.num_rows_per_expert.tolist() == [0, 1]


def test_an_expert_named_twice_gets_the_row_twice_in_order_of_k():
    plan = distribute(node_routing([[2, 3, 2]], (0, 1, 1)), PLACEMENT, rank=1)
    assert plan.pair_to_k.tolist() == [0, 1, 2]
    assert plan.pair_to_slot.tolist() == [0, 2, 1]


def test_a_rank_without_experts_and_a_node_without_rows():
    placement = ExpertPlacement.explicit([0, 0], world_size=2)
    nothing = distribute(node_routing([[0, 1]], (0, 1, 1)), placement, rank=1, expert_alignment=4)
    assert (nothing.num_slots, nothing.block_to_first_slot, nothing.num_rows_per_expert.tolist()) == (0, (0,), [])
    empty = distribute(NodeRouting(torch.empty(0, 2, dtype=torch.int32), None, (0, 0, 0)), placement, rank=0)
    assert (empty.num_slots, empty.num_rows_per_expert.tolist()) == (0, [0, 0])


def test_local_ranks_that_need_a_row():
    placement, topology = ExpertPlacement.contiguous(4, 4), Topology((0, 0, 1, 1))
    routing = node_routing([[0, 1], [2, -1], [3, 0], [-1, -1]], (0, 4, 4, 4, 4))
    assert mark_local_ranks(routing, placement, topology, node=0).int().tolist() == [[1, 1], [0, 0], [1, 0], [0, 0]]
    assert mark_local_ranks(routing, placement, topology, node=1).int().tolist() == [[0, 0], [1, 0], [0, 1], [0, 0]]
