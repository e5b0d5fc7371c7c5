"""The twin of the kernel ``plan`` by hand, then against plain counting."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, strategies as st

from comparison import assert_same_bits
from fusco.core.placement import ExpertPlacement
from fusco.cpu.kernels.plan_pairs import plan_pairs
from fusco.planner.dispatch_plan import NodeRouting, mark_destinations
from generator import KINDS, Case, number_of
from reference.plan import DROPPED, NOT_HERE, mark_ranks, plan_slots

ALIGNMENTS = (1, 2, 5, 16)
WORLD_SIZES = (1, 2, 3, 8)


def table_of(placement: ExpertPlacement, rank: int) -> torch.Tensor:
    return placement.local_index_table(rank, torch.device("cpu"))[:-1].int()


def placement_of(case: Case) -> ExpertPlacement:
    """Equal shares, or any; some ranks may have no expert then."""
    if case.seed % 2 == 0:
        return ExpertPlacement.contiguous(case.num_experts, case.world_size)
    ranks = [number_of(0, case.world_size - 1, case.seed, "owner", e) for e in range(case.num_experts)]
    return ExpertPlacement.explicit(ranks, case.world_size)


def routing_of(case: Case) -> NodeRouting:
    counts = [case.num_tokens(rank) for rank in range(case.world_size)]
    return NodeRouting(torch.cat(case.world_topk_idx), None, (0, *itertools.accumulate(counts)))


def check_against_counting(
    case: Case, rank: int, alignment: int, max_slots: int | None, rows_per_expert: int | None = None
) -> None:
    """Compare the twin with plain counting, pair by pair."""
    placement, routing = placement_of(case), routing_of(case)
    table, num_local = table_of(placement, rank).tolist(), len(placement.rank_to_experts[rank])
    plan = plan_slots(routing.topk_idx, table_of(placement, rank), num_local, alignment, max_slots, rows_per_expert)
    local_experts = [[table[e] if e >= 0 else -1 for e in row] for row in routing.topk_idx.tolist()]
    num_rows = [sum(row.count(e) for row in local_experts) for e in range(num_local)]
    padded = [-(-n // alignment) * alignment for n in num_rows]
    *firsts, needed = [0, *itertools.accumulate(padded)]
    limit = needed if max_slots is None else max_slots
    limits = [limit] * num_local
    if rows_per_expert:
        firsts = [rows_per_expert * e for e in range(num_local)]
        limits, needed = [first + rows_per_expert for first in firsts], max(num_rows, default=0)
    following, expected = firsts.copy(), []
    for row in local_experts:
        expected.append([])
        for e in row:
            slot = following[e] if e >= 0 else NOT_HERE
            expected[-1].append(DROPPED if e >= 0 and slot >= limits[e] else slot)
            if e >= 0:
                following[e] += 1
    shape = routing.topk_idx.shape
    assert_same_bits(plan.row_to_slots, torch.tensor(expected, dtype=torch.int32).view(shape), "row_to_slots")
    kept = [max(0, min(n, end - first)) for n, first, end in zip(num_rows, firsts, limits, strict=True)]
    assert (plan.num_rows_per_expert.tolist(), plan.num_rows_per_expert.dtype) == (kept, torch.int64)
    assert plan.num_dropped_per_expert.tolist() == [n - m for n, m in zip(num_rows, kept, strict=True)]
    blocks = plan.block_to_first_slot, plan.block_to_end_slot, plan.num_dropped_per_expert
    assert {each.dtype for each in blocks} == {torch.int32}
    begins = [min(first, end) for first, end in zip(firsts, limits, strict=True)]
    assert plan.block_to_first_slot.tolist() == begins
    ends = [min(begin + n, end) for begin, n, end in zip(begins, padded, limits, strict=True)]
    assert plan.block_to_end_slot.tolist() == ends
    assert plan.num_slots_needed == needed


def test_slots_by_hand():
    # The routing of the planner's own test: expert 0 takes rows 0 and 2, expert 1 rows 0, 1 and 3.
    ids, table = torch.tensor([[1, 0], [1, 2], [0, -1], [3, 1]]), torch.tensor([0, 1, -1, -1], dtype=torch.int32)
    plan = plan_slots(ids, table, num_local_experts=2)
    assert plan.row_to_slots.tolist() == [[2, 0], [3, -1], [1, -1], [-1, 4]]
    assert plan.row_to_slots.dtype == plan.block_to_first_slot.dtype == torch.int32
    assert plan.num_rows_per_expert.tolist() == [2, 3]
    assert plan.num_rows_per_expert.dtype == torch.int64
    assert plan.block_to_first_slot.tolist() == [0, 2]
    assert plan.block_to_end_slot.tolist() == [2, 5]
    assert plan.num_slots_needed == 5


def test_blocks_are_rounded_up():
    ids, table = torch.tensor([[1, 0], [1, 2], [0, -1], [3, 1]]), torch.tensor([0, 1, -1, -1], dtype=torch.int32)
    plan = plan_slots(ids, table, num_local_experts=2, expert_alignment=4)
    assert plan.row_to_slots.tolist() == [[4, 0], [5, -1], [1, -1], [-1, 6]]
    assert plan.num_rows_per_expert.tolist() == [2, 3]
    assert plan.block_to_first_slot.tolist() == [0, 4]
    assert plan.block_to_end_slot.tolist() == [4, 8]


@pytest.mark.parametrize(
    ("max_slots", "slots", "num_rows", "firsts", "ends"),
    [
        (8, [[4, 0], [5, -1], [1, -1], [-1, 6]], [2, 3], [0, 4], [4, 8]),
        (6, [[4, 0], [5, -1], [1, -1], [-1, -2]], [2, 2], [0, 4], [4, 6]),
        (4, [[-2, 0], [-2, -1], [1, -1], [-1, -2]], [2, 0], [0, 4], [4, 4]),
        (1, [[-2, 0], [-2, -1], [-2, -1], [-1, -2]], [1, 0], [0, 1], [1, 1]),
    ],
)
def test_what_does_not_fit_is_dropped(max_slots, slots, num_rows, firsts, ends):
    ids, table = torch.tensor([[1, 0], [1, 2], [0, -1], [3, 1]]), torch.tensor([0, 1, -1, -1], dtype=torch.int32)
    plan = plan_slots(ids, table, num_local_experts=2, expert_alignment=4, max_slots=max_slots)
    assert plan.row_to_slots.tolist() == slots
    assert plan.num_rows_per_expert.tolist() == num_rows
    assert (plan.block_to_first_slot.tolist(), plan.block_to_end_slot.tolist()) == (firsts, ends)
    assert plan.num_slots_needed == 8


def test_the_same_expert_twice_takes_two_slots_in_order_of_k():
    table = torch.tensor([-1, -1, 0, 1], dtype=torch.int32)
    assert plan_slots(torch.tensor([[2, 3, 2]]), table, num_local_experts=2).row_to_slots.tolist() == [[0, 2, 1]]


def test_ids_that_are_no_experts_have_no_slot_and_no_rank():
    ids = torch.tensor([[-1, -7], [2, 1 << 40], [0, 1]])
    plan = plan_slots(ids, torch.tensor([0, 1], dtype=torch.int32), num_local_experts=2)
    assert plan.row_to_slots.tolist() == [[-1, -1], [-1, -1], [0, 1]]
    assert mark_ranks(ids, torch.tensor([0, 1], dtype=torch.int32)).tolist() == [0, 0, 3]


def test_a_rank_without_experts_and_a_world_without_rows():
    nothing = plan_slots(torch.tensor([[0, 1]]), torch.tensor([-1, -1], dtype=torch.int32), 0, expert_alignment=4)
    assert (nothing.row_to_slots.tolist(), nothing.block_to_first_slot.tolist()) == ([[-1, -1]], [])
    assert (nothing.num_rows_per_expert.tolist(), nothing.num_slots_needed) == ([], 0)
    empty = plan_slots(torch.empty(0, 2, dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32), 2)
    assert (empty.row_to_slots.shape, empty.num_rows_per_expert.tolist()) == ((0, 2), [0, 0])
    assert mark_ranks(torch.empty(0, 2, dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32)).shape == (0,)


def test_the_mark_of_rank_31_is_the_sign():
    owners = torch.tensor([31, 0], dtype=torch.int32)
    assert mark_ranks(torch.tensor([[0, -1], [0, 1], [1, 1]]), owners).tolist() == [-(1 << 31), 1 - (1 << 31), 1]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_as_plain_counting(kind, world_size):
    for seed in range(4):
        num_topk = number_of(1, 8, seed, "topk")
        case = Case(kind=kind, seed=seed, world_size=world_size, num_experts=24, num_topk=num_topk, max_tokens=13)
        for rank in range(world_size):
            alignment = ALIGNMENTS[(seed + rank) % len(ALIGNMENTS)]
            check_against_counting(case, rank, alignment, None)
            pairs = plan_pairs(routing_of(case), placement_of(case), rank, tuple(range(world_size)), alignment)
            needed = pairs.distribution.num_slots_needed
            for max_slots in {1, max(1, needed // 2), max(1, needed - 1), max(1, needed), needed + 3}:
                check_against_counting(case, rank, alignment, max_slots)
            for rows_per_expert in (alignment, 3 * alignment, 40 * alignment):
                check_against_counting(case, rank, alignment, None, rows_per_expert)


@given(
    kind=st.sampled_from(KINDS),
    seed=st.integers(0, 10_000),
    world_size=st.sampled_from(WORLD_SIZES),
    num_topk=st.integers(1, 32),
    alignment=st.integers(1, 40),
    max_slots=st.none() | st.integers(1, 300),
    blocks=st.none() | st.integers(1, 20),
)
def test_as_plain_counting_for_any_sizes(kind, seed, world_size, num_topk, alignment, max_slots, blocks):
    case = Case(kind=kind, seed=seed, world_size=world_size, num_experts=24, num_topk=num_topk, max_tokens=9)
    rows_per_expert = blocks and alignment * blocks
    check_against_counting(case, seed % world_size, alignment, max_slots, rows_per_expert)


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_of_own_tokens_as_the_planner(kind):
    for seed, world_size in itertools.product(range(4), WORLD_SIZES):
        case = Case(kind=kind, seed=seed, world_size=world_size, num_experts=24, num_topk=4, max_tokens=13)
        placement, routing = placement_of(case), routing_of(case)
        expert_to_rank = placement.membership_table(range(world_size), routing.topk_idx.device)
        is_marked = mark_destinations(routing.topk_idx, expert_to_rank, world_size)
        expected = (is_marked.int() << torch.arange(world_size, dtype=torch.int32)).sum(1).int()
        owners = torch.tensor(placement.expert_to_rank, dtype=torch.int32)
        assert_same_bits(mark_ranks(routing.topk_idx, owners), expected, "token_to_ranks")
