"""Owners of rows: against the twin, bit for bit, and what the rule promises."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fusco import ExpertPlacement
from fusco.core.topology import Topology
from fusco.cpu.kernels.choose_owners import choose_owners, count_experts
from fusco.planner.owners import OwnerTables
from fusco.planner.routing import UNPLACED, logical_id
from generator import KINDS, Case, random_places
from reference.choose_owners import choose_owners as choose_owners_slowly


def chosen_by(placement: ExpertPlacement, topology: Topology, ids: list[torch.Tensor]) -> list[torch.Tensor]:
    tables = [OwnerTables.of(placement, rank, topology) for rank in range(placement.world_size)]
    if not tables[0].needs_counts:
        return [choose_owners(of_rank, of) for of_rank, of in zip(ids, tables, strict=True)]
    counts = np.stack([count_experts(of_rank, placement.num_experts) for of_rank in ids])[:, tables[0].divided]
    return [choose_owners(of_rank, of, of.divide_rows(counts)) for of_rank, of in zip(ids, tables, strict=True)]


@pytest.mark.parametrize("has_shares", [False, True])
@pytest.mark.parametrize(("num_ranks", "ranks_per_node"), [(1, 1), (2, 1), (4, 4), (6, 2), (8, 4)])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_owners_are_those_of_the_twin(num_ranks, ranks_per_node, has_shares, dtype):
    topology = Topology.of_equal_nodes(num_ranks, ranks_per_node)
    for seed, kind in enumerate(KINDS):
        experts, shares = random_places(num_ranks, 2 + seed % 3, num_ranks + seed % 2, has_shares=has_shares, seed=seed)
        placement = ExpertPlacement.replicated(experts, shares, num_experts=num_ranks + seed % 2)
        sizes = {"world_size": num_ranks, "num_experts": placement.num_experts, "num_topk": 3, "max_tokens": 40}
        ids = [of_rank.to(dtype) for of_rank in Case(kind=kind, seed=seed, **sizes).world_topk_idx]
        expected = choose_owners_slowly(ids, experts, shares, topology.rank_to_node)
        for rank, (seen, wanted) in enumerate(zip(chosen_by(placement, topology, ids), expected, strict=True)):
            assert seen.dtype == dtype
            assert torch.equal(seen, wanted), (kind, rank)


def test_owners_take_their_shares_and_no_row_crosses_a_link_that_need_not():
    placement = ExpertPlacement.replicated([[0], [0], [1], [0]], [[0.5], [0.25], [1.0], [0.25]])
    topology = Topology.of_equal_nodes(4, 2)
    ids = [torch.zeros(number, 1, dtype=torch.int64) for number in (10, 30, 20, 20)]
    taken = [torch.bincount(of_rank.view(-1), minlength=4).tolist() for of_rank in chosen_by(placement, topology, ids)]
    # 80 rows: 40, 20, 20. Rank 0 keeps its 10 and gets 10 from rank 1; the other 20 can but come from rank 2.
    assert taken == [[10, 0, 0, 0], [10, 20, 0, 0], [20, 0, 0, 0], [0, 0, 0, 20]]


def test_rows_are_divided_by_given_quotas():
    tables = OwnerTables.of(
        ExpertPlacement.replicated([[0], [0]], [[1], [1]]), rank=1, topology=Topology.of_equal_nodes(2, 2)
    )
    assert tables.divide_rows(np.array([[4], [2]]), np.array([1, 5])).tolist() == [0, 2]
    assert tables.divide_rows(np.array([[4], [2]]), np.array([5, 1])).tolist() == [1, 2]


def test_invalid_ids_stay_invalid_and_can_be_named():
    tables = OwnerTables.of(ExpertPlacement.replicated([[0, 1, -1], [1, -1, 0]]), 0, Topology.of_equal_nodes(2, 2))
    ids = torch.tensor([[2, 5], [6, -2], [-1, 0], [2**31 - 1, 2**40], [-(2**31) + 7, 1], [-(2**31), 0]])
    chosen = choose_owners(ids, tables)
    assert chosen.tolist() == [[2 + UNPLACED, 5 + UNPLACED], *ids[1:].tolist()]
    invalid = (chosen < -1) | (chosen >= 6)
    assert [logical_id(each, 2, 6) for each in chosen[invalid].tolist()] == ids[invalid].tolist()


def test_one_place_of_each_expert_in_order_needs_no_choice():
    topology = Topology.of_equal_nodes(2, 1)
    assert OwnerTables.of(ExpertPlacement.contiguous(4, 2), 0, topology).is_identity
    assert OwnerTables.of(ExpertPlacement.replicated([[0, 1], [2, 3]]), 0, topology).is_identity
    assert not OwnerTables.of(ExpertPlacement.replicated([[0, 2], [1, 3]]), 0, topology).is_identity
    assert not OwnerTables.of(ExpertPlacement.replicated([[0, 1, -1], [2, 3, -1]]), 0, topology).is_identity
    # Id 2 is no expert, although there is a physical expert 2.
    assert not OwnerTables.of(ExpertPlacement.replicated([[0, 1], [-1, -1]]), 0, topology).is_identity


def test_lost_experts_have_no_owner():
    places, shares = [[0, 1], [2, 1], [3, -1]], [[1.0, 0.5], [1.0, 0.5], [1.0, 0.0]]
    for given in (None, shares):
        left = ExpertPlacement.replicated(places, given).without_ranks([1]).of_members([0, 2])
        tables = OwnerTables.of(left, 0, Topology.of_equal_nodes(2, 2))
        assert (tables.expert_to_first.tolist(), tables.owners.tolist()) == ([0, 1, 2, 2, 3], [0, 1, 2])
        assert tables.units.tolist() == ([2**20] * 3 if given else [])
    left = ExpertPlacement.explicit([0, 1, 2, 0], world_size=3).without_ranks([1]).of_members([0, 2])
    tables = OwnerTables.of(left, 0, Topology.of_equal_nodes(2, 2))
    assert (tables.owners.tolist(), left.physical.expert_to_rank) == ([0, 1, 2], (0, 1, 0))
    assert choose_owners(torch.tensor([[0, 2, 3, -1]]), tables).tolist() == [[0, 1, 2, -1]]
