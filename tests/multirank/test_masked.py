"""Outputs with a fixed number of rows for each expert, as masked grouped matrix products read them."""

from __future__ import annotations

import dataclasses

import masked_jobs as jobs
import pytest
from rank_setup import Setup
from replica_jobs import placement_of

from fusco import Settings
from generator import KINDS

pytestmark = pytest.mark.multirank

SMALL = Settings(timeout_s=60.0, slice_bytes=64)  # slices of a few rows, so that some have none left to sum


@pytest.mark.parametrize(
    ("num_ranks", "ranks_per_node", "is_attached"),
    [(1, 1, True), (2, 2, False), (2, 1, True), (4, 4, True), (6, 3, False), (8, 4, True)],
)
def test_rows_of_each_expert_are_apart(world, num_ranks, ranks_per_node, is_attached):
    balancer, settings = ("lanes", Setup(ranks_per_node=1).settings) if is_attached else ("scattered", SMALL)
    setup = Setup(ranks_per_node=ranks_per_node, balancer=balancer, settings=settings)
    world.run(jobs.check_masked, num_ranks, setup, range(len(KINDS)))


@pytest.mark.parametrize(
    ("num_ranks", "ranks_per_node", "weighted_by"), [(1, 1, "combine"), (4, 2, "combine"), (4, 2, "experts")]
)
def test_gradients_of_masked_rows(world, num_ranks, ranks_per_node, weighted_by):
    # Static rows between nodes on CUDA have these lanes, too, and others might round otherwise.
    setup = Setup(ranks_per_node=ranks_per_node, balancer="static")
    world.run(jobs.check_gradients, num_ranks, setup, range(len(KINDS)), weighted_by)


def test_places_have_their_own_rows(world):
    setup = Setup(ranks_per_node=2, num_experts=11, num_topk=5)
    setup = dataclasses.replace(setup, expert_placement=placement_of(setup, 4, seed=1))
    world.run(jobs.check_masked, 4, setup, range(len(KINDS)))


@pytest.mark.cpu_only  # CUDA raises later
@pytest.mark.parametrize(("num_ranks", "ranks_per_node"), [(2, 2), (4, 2)])
def test_an_expert_with_too_many_rows_is_named(world, num_ranks, ranks_per_node):
    world.run(jobs.check_overflow, num_ranks, Setup(ranks_per_node=ranks_per_node))
