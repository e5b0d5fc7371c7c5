"""Placement of experts on ranks: contiguous, explicit, invalid."""

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from fusco import ExpertPlacement

CPU = torch.device("cpu")


def test_contiguous_runs():
    placement = ExpertPlacement.contiguous(num_experts=6, world_size=3)
    assert placement.expert_to_rank == (0, 0, 1, 1, 2, 2)
    assert placement.expert_to_local == (0, 1, 0, 1, 0, 1)


def test_uneven_placement_with_a_rank_that_owns_nothing():
    placement = ExpertPlacement.explicit([2, 0, 2, 2], world_size=3)
    assert placement.rank_to_experts == ((1,), (), (0, 2, 3))
    assert placement.expert_to_local == (0, 0, 1, 2)
    assert placement.local_index_table(2, CPU).tolist() == [0, -1, 1, 2, -1]
    assert placement.local_index_table(1, CPU).tolist() == [-1] * 5
    assert placement.membership_table((7, 8, -1), CPU).tolist() == [-1, 7, -1, -1, -1]


@pytest.mark.parametrize("num_experts", [1, 5])
def test_experts_that_do_not_divide_evenly(num_experts):
    with pytest.raises(ValueError, match=f"{num_experts} experts .* 4 ranks"):
        ExpertPlacement.contiguous(num_experts, world_size=4)


@pytest.mark.parametrize(("num_experts", "world_size"), [(0, 4), (-4, 4), (4, 0)])
def test_there_are_experts_and_ranks(num_experts, world_size):
    name = "num_experts" if num_experts < 1 else "world_size"
    with pytest.raises(ValueError, match=f"{name} must be positive, got {min(num_experts, world_size)}"):
        ExpertPlacement.contiguous(num_experts, world_size)


def test_there_are_at_most_a_million_experts():
    with pytest.raises(ValueError, match="num_experts must be at most 1048576, got 4294967296"):
        ExpertPlacement.of(2**32, None, world_size=2)
    assert ExpertPlacement.of(2**20, None, world_size=2).expert_to_local[-1] == 2**19 - 1  # in well under a second


@pytest.mark.parametrize("expert_to_rank", ["0101", 5, [0, 1.5], [0, None]])
def test_a_placement_is_a_sequence_of_integers(expert_to_rank):
    with pytest.raises(TypeError, match="expert_placement must be a sequence of integers, got"):
        ExpertPlacement.explicit(expert_to_rank, world_size=2)


def test_ranks_of_other_libraries_integers():
    expected = ExpertPlacement((0, 1), 2)
    assert ExpertPlacement.explicit(torch.tensor([0, 1]), world_size=2) == expected
    assert ExpertPlacement.explicit(np.array([0, 1]), world_size=2) == expected


def test_ranks_outside_the_group_and_no_experts():
    with pytest.raises(ValueError, match="expert 1 is placed on rank 2, outside a group of 2"):
        ExpertPlacement.explicit([0, 2], world_size=2)
    with pytest.raises(ValueError, match="rank -1"):
        ExpertPlacement.explicit([-1], world_size=2)
    with pytest.raises(ValueError, match="at least one expert"):
        ExpertPlacement.explicit([], world_size=2)


@given(st.integers(1, 6).flatmap(lambda n: st.tuples(st.just(n), st.lists(st.integers(0, n - 1), min_size=1))))
def test_every_expert_is_once_among_the_experts_of_its_rank(sizes):
    world_size, owners = sizes
    placement = ExpertPlacement.explicit(owners, world_size)
    for expert, rank in enumerate(owners):
        assert placement.rank_to_experts[rank][placement.expert_to_local[expert]] == expert
        assert placement.local_index_table(rank, CPU)[expert] == placement.expert_to_local[expert]
    assert sorted(e for experts in placement.rank_to_experts for e in experts) == list(range(len(owners)))
