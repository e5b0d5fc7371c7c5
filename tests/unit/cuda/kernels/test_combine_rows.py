"""The twin of the kernel ``combine_rows`` by hand, then against the law."""

from __future__ import annotations

import itertools

import pytest
import torch

from comparison import assert_same_bits, assert_within, world_rows
from fusco.core.placement import ExpertPlacement
from fusco.core.rows import ROW_DTYPES
from generator import KINDS, Case
from law import Law
from reference.combine_rows import combine_rows, sum_partially
from reference.plan import PlannedSlots, mark_ranks, plan_slots

NUM_EXPERTS, NUM_TOPK = 24, 6


def test_partial_sums_by_hand():
    rows = torch.tensor([[1.0, 2.0], [10.0, 20.0], [100.0, 200.0]])
    slots = torch.tensor([[2, -1, 0], [-1, -2, -1], [1, 1, -2]], dtype=torch.int32)
    weights = torch.tensor([[2.0, 5.0, 3.0], [1.0, 1.0, 1.0], [1.0, -1.0, 7.0]])
    sums = sum_partially(rows, slots, weights, torch.float32)
    assert sums.tolist() == [[203.0, 406.0], [0.0, 0.0], [0.0, 0.0]]
    assert sum_partially(rows, slots, None, torch.float64).tolist() == [[101.0, 202.0], [0.0, 0.0], [20.0, 40.0]]


def test_partial_sums_are_rounded_for_the_wire_and_sums_once_more():
    rows, slots = torch.tensor([[1.0], [2.0**-8]], dtype=torch.bfloat16), torch.tensor([[0, 1]], dtype=torch.int32)
    assert sum_partially(rows, slots, None, torch.bfloat16).item() == 1.0  # halfway, to even
    partial = sum_partially(rows, slots, None, torch.float32)
    assert partial.item() == 1.0 + 2.0**-8
    # 1 + 2^-8 from another rank and 2^-8 here make 1 + 2^-7, the next bfloat16.
    mine = torch.tensor([[1, -1]], dtype=torch.int32)
    for wire, expected in ((partial, 1.0 + 2.0**-7), (partial.bfloat16(), 1.0)):
        assert combine_rows(rows, mine, None, {1: wire}, torch.tensor([3]), rank=0).item() == expected


def test_own_terms_are_added_one_by_one_in_the_turn_of_their_rank():
    # In float32, 1e8 + 1 - 1e8 is 0 and 1e8 - 1e8 + 1 is 1: the order shows.
    rows, slots = torch.tensor([[1.0], [-1e8]]), torch.tensor([[0, 1]], dtype=torch.int32)
    received = {0: torch.tensor([[1e8]]), 2: torch.tensor([[0.5]])}
    assert combine_rows(rows, slots, None, received, torch.tensor([0b111]), rank=1).item() == 0.5
    assert combine_rows(rows, slots.flip(1), None, received, torch.tensor([0b111]), rank=1).item() == 1.5


def test_what_is_not_marked_is_not_looked_at():
    rows, slots = torch.tensor([[1.0]]), torch.tensor([[0], [-1]], dtype=torch.int32)
    received = {0: torch.tensor([[float("nan")], [2.0]])}
    assert combine_rows(rows, slots, None, received, torch.tensor([0b10, 0b01]), rank=1).tolist() == [[1.0], [2.0]]
    assert combine_rows(rows, slots, None, received, torch.tensor([0b10, 0]), rank=1).tolist() == [[1.0], [0.0]]


def test_no_tokens_no_slots_no_width():
    none = torch.zeros(0, 2, dtype=torch.int32)
    marks = torch.zeros(0, dtype=torch.int32)
    assert combine_rows(torch.zeros(0, 3), none, None, {}, marks, rank=0).shape == (0, 3)
    assert combine_rows(torch.zeros(2, 0), none[:, :0], None, {}, marks, rank=0).shape == (0, 0)


class World:
    """The twins of all ranks of a case, one after the other."""

    def __init__(self, case: Case, alignment: int) -> None:
        self.case, self.ranks = case, range(case.world_size)
        self.placement = ExpertPlacement.contiguous(case.num_experts, case.world_size)
        self.law = Law(case.world_topk_idx, self.placement.expert_to_rank, alignment)
        self.first_row = (0, *itertools.accumulate(case.num_tokens(rank) for rank in self.ranks))
        self._plans = [self._plan(rank, alignment) for rank in self.ranks]

    def _plan(self, rank: int, alignment: int) -> PlannedSlots:
        table = self.placement.local_index_table(rank, torch.device("cpu"))[:-1].int()
        num_local = len(self.placement.rank_to_experts[rank])
        return plan_slots(torch.cat(self.case.world_topk_idx), table, num_local, alignment)

    def slots(self, rank: int, owner: int) -> torch.Tensor:
        """Return the slots on ``rank`` of the rows of ``owner``'s tokens."""
        return self._plans[rank].row_to_slots[self.first_row[owner] : self.first_row[owner + 1]]

    def combine(
        self, rank: int, y: list[torch.Tensor], weights: list[torch.Tensor] | None, wire_dtype: torch.dtype
    ) -> torch.Tensor:
        own = None if weights is None else weights[rank]
        received = {
            src: sum_partially(y[src], self.slots(src, rank), own, wire_dtype) for src in self.ranks if src != rank
        }
        owners = torch.tensor(self.placement.expert_to_rank, dtype=torch.int32)
        marks = mark_ranks(self.case.topk_idx(rank), owners)
        return combine_rows(y[rank], self.slots(rank, rank), own, received, marks, rank)


@pytest.mark.parametrize("dtype", ROW_DTYPES, ids=str)
@pytest.mark.parametrize("wire_dtype", [None, torch.float32], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_sums_are_within_the_law(kind, wire_dtype, dtype):
    for seed, world_size in enumerate([1, 2, 3, 8]):
        case = Case(
            kind=kind, seed=seed, world_size=world_size, num_experts=NUM_EXPERTS, num_topk=NUM_TOPK, max_tokens=9
        )
        world, hidden = World(case, alignment=1 + 2 * seed), (1, 3, 5, 17)[seed]
        y = world_rows(world.law, hidden, dtype, seed)
        weights_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        for weights in (None, case.world_topk_weights(weights_dtype)):
            for rank in world.ranks:
                out = world.combine(rank, y, weights, torch.promote_types(dtype, wire_dtype or dtype))
                assert out.dtype == dtype
                # On CUDA sums travel between any two ranks as they do between nodes.
                sums = world.law.sums(rank, y, weights, range(world_size))
                assert_within(out, sums.exact, world.law.error_bound(sums, dtype, wire_dtype), f"rank {rank}")


def test_alone_it_is_the_sum_of_the_own_terms():
    case = Case(kind="repeated experts", seed=3, world_size=1, num_experts=4, num_topk=3, max_tokens=20)
    world = World(case, alignment=2)
    y = world_rows(world.law, 7, torch.float32, 3)
    weights = case.world_topk_weights()
    expected = sum_partially(y[0], world.slots(0, 0), weights[0], torch.float32)
    assert_same_bits(world.combine(0, y, weights, torch.float32), expected, "combine")
