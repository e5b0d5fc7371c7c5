"""``plan_pairs``: the slots of each row and the ranks that need it, by hand and by the specification."""

import pytest
import torch

from fusco import StaticRows
from fusco.core.placement import ExpertPlacement
from fusco.cpu.kernels.plan_pairs import plan_pairs
from fusco.cpu.plan import overflow_of
from fusco.planner.dispatch_plan import NodeRouting, mark_destinations
from generator import number_of, random_of
from law import Law, Pair

PLACEMENT = ExpertPlacement.contiguous(num_experts=4, world_size=2)
NODE_0 = (0, -1, 1, -1)  # local ranks


def plan(topk_idx, rank, alignment=1, placement=PLACEMENT, static=None):
    routing = NodeRouting(torch.tensor(topk_idx), None, (0, len(topk_idx), len(topk_idx)))
    return plan_pairs(routing, placement, rank, (0, 1), alignment, static).distribution


def test_pairs_of_rows_and_ranks_that_need_them():
    routing = NodeRouting(torch.tensor([[1, 0], [1, 2], [0, -1]], dtype=torch.int32), None, (0, 2, 3))
    pairs = plan_pairs(routing, PLACEMENT, rank=0, rank_to_local=(0, 1))
    assert pairs.row_to_first_pair.tolist() == [0, 2, 3, 4]
    assert pairs.row_to_locals.int().tolist() == [[1, 0], [1, 1], [1, 0]]


def test_blocks_in_order_of_expert_and_rows_in_order_of_source_and_token():
    pairs = plan([[1, 0], [1, 2], [0, -1], [3, 1]], rank=0)
    # Expert 0 takes rows 0 and 2, expert 1 rows 0, 1 and 3.
    assert pairs.pair_to_row.tolist() == [0, 0, 1, 2, 3]
    assert pairs.pair_to_k.tolist() == [0, 1, 0, 0, 1]
    assert pairs.pair_to_slot.tolist() == [2, 0, 3, 1, 4]
    assert pairs.num_rows_per_expert.tolist() == [2, 3]
    assert pairs.padding_slots.tolist() == []


def test_alignment_rounds_every_block_up():
    pairs = plan([[1, 0], [1, 2], [0, -1], [3, 1]], rank=0, alignment=4)
    assert pairs.block_to_first_slot == (0, 4)
    assert pairs.block_to_end_slot == (4, 8)
    assert pairs.pair_to_slot.tolist() == [4, 0, 5, 1, 6]
    assert pairs.num_rows_per_expert.tolist() == [2, 3]
    assert pairs.padding_slots.tolist() == [2, 3, 7]


def test_an_expert_without_rows_has_an_empty_block_at_any_alignment():
    pairs = plan([[1, -1]], rank=0, alignment=8)
    assert pairs.block_to_first_slot == (0, 0)
    assert pairs.block_to_end_slot == (0, 8)
    assert pairs.num_rows_per_expert.tolist() == [0, 1]


def test_an_expert_named_twice_gets_the_row_twice_in_order_of_k():
    pairs = plan([[2, 3, 2]], rank=1)
    assert pairs.pair_to_k.tolist() == [0, 1, 2]
    assert pairs.pair_to_slot.tolist() == [0, 2, 1]


def test_a_rank_without_experts_and_a_node_without_rows():
    nothing = plan([[0, 1]], rank=1, alignment=4, placement=ExpertPlacement.explicit([0, 0], world_size=2))
    assert (nothing.num_slots, nothing.block_to_first_slot, nothing.num_rows_per_expert.tolist()) == (0, (), [])
    routing = NodeRouting(torch.empty(0, 2, dtype=torch.int32), None, (0, 0, 0))
    empty = plan_pairs(routing, ExpertPlacement.explicit([0, 0], world_size=2), 0, (0, 1)).distribution
    assert (empty.num_slots, empty.num_rows_per_expert.tolist()) == (0, [0, 0])


def test_each_expert_has_its_own_rows():
    pairs = plan([[1, 0], [1, 2], [0, -1], [3, 1]], rank=0, alignment=2, static=StaticRows(rows_per_expert=4))
    assert pairs.pair_to_slot.tolist() == [4, 0, 5, 1, 6]
    assert (pairs.num_slots, pairs.num_slots_needed) == (8, 3)
    assert (pairs.block_to_first_slot, pairs.block_to_end_slot) == ((0, 4), (2, 8))
    assert (pairs.has_padding, pairs.padding_slots.tolist()) == (True, [7])  # slots 2 and 3 are not cleared


def test_the_last_rows_of_an_expert_are_dropped():
    pairs = plan([[1, 0], [1, 2], [0, -1], [3, 1]], rank=0, static=StaticRows(rows_per_expert=2))
    assert pairs.pair_to_row.tolist() == [0, 0, 1, 2]
    assert pairs.pair_to_slot.tolist() == [2, 0, 3, 1]
    assert (pairs.num_rows_per_expert.tolist(), pairs.num_dropped_per_expert.tolist()) == ([2, 2], [0, 1])
    assert (pairs.num_slots, pairs.num_slots_needed) == (4, 3)
    error = overflow_of(pairs, StaticRows(rows_per_expert=2), rank=5)
    assert str(error).startswith(
        "rank 5 needed 3 rows for its local expert 1 in a dispatch into static rows, but had StaticRows("
        "rows_per_expert=2); rows that did not fit are missing"
    )
    assert (error.num_rows, error.num_rows_needed, error.local_expert) == (2, 3, 1)
    assert overflow_of(pairs, StaticRows(rows_per_expert=2, on_overflow="drop"), rank=5) is None
    assert overflow_of(pairs, StaticRows(rows_per_expert=3), rank=5) is None


@pytest.mark.parametrize(
    ("static_rows", "rows_per_expert"), [(None, None), (1, None), (5, None), (1000, None), (None, 4), (None, 8)]
)
@pytest.mark.parametrize("alignment", [1, 4])
def test_random_routing(alignment, static_rows, rows_per_expert):
    for seed in range(20):
        num_experts, num_topk = number_of(1, 9, seed, "experts"), number_of(0, 4, seed, "topk")
        placement = ExpertPlacement.explicit([number_of(0, 3, seed, e) for e in range(num_experts)], world_size=4)
        shape = (number_of(0, 12, seed, "rows"), num_topk)
        ids = torch.randint(-1, num_experts, shape, generator=random_of(seed, "ids"), dtype=torch.int32)
        is_static = static_rows or rows_per_expert
        static = StaticRows(static_rows, rows_per_expert=rows_per_expert) if is_static else None
        law = Law([ids[:0], ids[:0], ids[:0], ids], placement.expert_to_rank, alignment, rows_per_expert)
        pairs = plan_pairs(NodeRouting(ids, None, (0, 0, 0, 0, len(ids))), placement, 2, NODE_0, alignment, static)

        made = pairs.distribution
        needed = law.slots(2)
        kept = needed if static_rows is None else needed[:static_rows]
        num_slots = len(needed) if static_rows is None else static_rows
        slots = [None] * len(kept)
        for row, k, slot in zip(made.pair_to_row, made.pair_to_k, made.pair_to_slot, strict=True):
            slots[slot] = Pair(3, int(row), int(k))
        assert slots == kept
        most = len(needed) if rows_per_expert is None else max(map(len, law.wanted(2)), default=0)
        assert (made.num_slots_needed, made.num_slots) == (most, num_slots)
        blocks = list(zip(made.block_to_first_slot, made.block_to_end_slot, strict=True))
        assert made.num_rows_per_expert.tolist() == [sum(map(bool, kept[first:end])) for first, end in blocks]
        counts = made.num_rows_per_expert.tolist()
        dropped = [len(block) - count for block, count in zip(law.wanted(2), counts, strict=True)]
        assert made.num_dropped_per_expert.tolist() == dropped
        are_zeros = [pair is None and not law.undefined(2)[slot] for slot, pair in enumerate(kept)]
        assert made.padding_slots.tolist() == [slot for slot, is_zero in enumerate(are_zeros) if is_zero]
        assert made.has_padding == any(are_zeros)

        assert torch.equal(pairs.row_to_first_pair, torch.searchsorted(made.pair_to_row, torch.arange(len(ids) + 1)))
        marks = mark_destinations(ids, placement.membership_table(NODE_0, ids.device), num_parts=2)
        assert torch.equal(pairs.row_to_locals, marks)
