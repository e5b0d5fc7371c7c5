"""Experts in several places: rows as specified, placements that are replaced, gradients, mistakes."""

from __future__ import annotations

import dataclasses

import pytest
import replica_jobs as jobs
import torch
from rank_setup import Setup

from fusco import Settings
from generator import KINDS, random_places

pytestmark = pytest.mark.multirank

SETTINGS = Settings(timeout_s=60.0, slice_bytes=200)


def setup_of(num_ranks: int, ranks_per_node: int, seed: int = 0, **rest) -> Setup:
    setup = Setup(ranks_per_node=ranks_per_node, num_experts=11, num_topk=5, settings=SETTINGS, **rest)
    return dataclasses.replace(setup, expert_placement=jobs.placement_of(setup, num_ranks, seed))


@pytest.mark.parametrize(
    ("num_ranks", "ranks_per_node", "has_shares"),
    [(1, 1, True), (2, 1, True), (2, 2, False), (6, 2, True), (8, 4, False)],
)
def test_rows_go_to_the_places_of_the_rule_before_and_after_place(world, num_ranks, ranks_per_node, has_shares):
    setup = setup_of(num_ranks, ranks_per_node, seed=int(has_shares))
    world.run(jobs.check_replicas, num_ranks, setup, range(num_ranks, num_ranks + len(KINDS)))


def test_static_rows(world):
    world.run(jobs.check_replicas, 4, setup_of(4, 2, seed=1), range(len(KINDS)), is_static=True)


def test_rows_that_are_not_attached_to_records(world):
    world.run(jobs.check_replicas, 4, setup_of(4, 2, max_tokens=300), range(6))


def test_more_experts_with_shares_than_a_record_has_counts(world):
    experts, shares = random_places(2, 200, 220, has_shares=True, seed=1)
    setup = Setup(ranks_per_node=1, num_experts=220, num_topk=8, settings=SETTINGS, max_tokens=100)
    setup = dataclasses.replace(setup, expert_placement=jobs.ExpertPlacement.replicated(experts, shares))
    plain = dataclasses.replace(setup, expert_placement=None)
    assert _all_rows(world.run(jobs.rows_of_experts, 2, setup, 3)) == _all_rows(
        world.run(jobs.rows_of_experts, 2, plain, 3)
    )


@pytest.mark.parametrize("seed", [0, 1])
def test_an_expert_has_the_same_rows_wherever_they_are(world, seed):
    setup = setup_of(4, 2, seed)
    plain = dataclasses.replace(setup, expert_placement=(0, 1, 2, 3, 2, 1, 0, 0, 1, 2, 3))
    assert _all_rows(world.run(jobs.rows_of_experts, 4, setup, 5)) == _all_rows(
        world.run(jobs.rows_of_experts, 4, plain, 5)
    )


@pytest.mark.parametrize("seed", [0, 1])
def test_gradients_do_not_depend_on_places(world, seed):
    setup = setup_of(4, 2, seed)
    plain = dataclasses.replace(setup, expert_placement=(0, 1, 2, 3, 2, 1, 0, 0, 1, 2, 3))
    for ours, theirs in zip(*(world.run(jobs.gradients, 4, each, 7) for each in (setup, plain)), strict=True):
        for seen, expected in zip(ours, theirs, strict=True):
            torch.testing.assert_close(seen, expected, rtol=1e-12, atol=1e-12)


def test_mistakes_are_named_on_all_ranks(world):
    of_ranks = world.run(jobs.mistakes, 2, setup_of(2, 1))
    for rank, errors in enumerate(of_ranks):
        differing, no_placement, invalid, placed, invalid_with_shares, no_tensor, too_few = errors
        assert differing.startswith("MismatchError: ranks disagree in place: placement is ")
        assert "on rank 0" in differing
        assert "sequence of integers" in no_placement
        assert "topk_idx[3, 0] = 13 is not an expert: ids go from 0 to 10" in invalid
        assert not placed
        assert "topk_idx[3, 0] = 13 is not an expert: ids go from 0 to 10" in invalid_with_shares
        assert "topk_idx must be a tensor" in no_tensor
        assert "payload 0 has shape" in too_few
        kind = "ValueError" if rank == 1 else "RejectedInputError"
        assert invalid.startswith(kind)
        assert invalid_with_shares.startswith(kind)


def _all_rows(of_ranks: list[list[str]]) -> list[str]:
    return sorted(row for rows in of_ranks for row in rows)
