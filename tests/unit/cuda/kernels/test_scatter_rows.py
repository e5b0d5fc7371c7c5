"""The twin of the kernel ``scatter_rows`` by hand, then against the law."""

from __future__ import annotations

import pytest
import torch

from comparison import assert_same_bits
from fusco.core.placement import ExpertPlacement
from generator import KINDS, Case, any_bits
from law import Law
from reference.plan import plan_slots
from reference.scatter_rows import scatter_rows

DTYPES = [torch.bool, torch.uint8, torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.float64, torch.complex64]


def test_rows_by_hand():
    slots = torch.tensor([[2, 0], [3, -1], [-2, -1]], dtype=torch.int32)
    rows = scatter_rows(torch.tensor([[7, 8], [5, 6], [3, 4]]), slots, num_slots=5)
    assert rows.tolist() == [[7, 8], [0, 0], [7, 8], [5, 6], [0, 0]]


def test_nothing_to_scatter():
    assert scatter_rows(torch.zeros(0, 3), torch.zeros(0, 2, dtype=torch.int32), 0).shape == (0, 3)
    nowhere = torch.full((2, 1), -1, dtype=torch.int32)
    assert scatter_rows(torch.ones(2, 1), nowhere, num_slots=2).tolist() == [[0.0], [0.0]]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("alignment", [1, 5])
def test_rows_stand_as_the_law_says(kind, alignment):
    for seed, shape in enumerate([(), (1,), (3,), (2, 3), (17,)]):
        world_size = (1, 2, 3, 8)[seed % 4]
        case = Case(kind=kind, seed=seed, world_size=world_size, num_experts=24, num_topk=4, max_tokens=11)
        placement = ExpertPlacement.contiguous(24, world_size)
        law = Law(case.world_topk_idx, placement.expert_to_rank, alignment)
        dtype = DTYPES[(seed + alignment) % len(DTYPES)]
        x = [any_bits((case.num_tokens(rank), *shape), dtype, seed, "x", rank) for rank in law.ranks]
        for rank in law.ranks:
            table = placement.local_index_table(rank, torch.device("cpu"))[:-1].int()
            plan = plan_slots(torch.cat(case.world_topk_idx), table, len(placement.rank_to_experts[rank]), alignment)
            assert plan.num_rows_per_expert.tolist() == law.counts(rank)
            rows = scatter_rows(torch.cat(x), plan.row_to_slots, plan.num_slots_needed)
            assert_same_bits(rows, law.rows(rank, x), f"rank {rank} of {case}")
