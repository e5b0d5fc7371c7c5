"""Outputs with a fixed number of rows for each expert, as masked grouped matrix products read them."""

from __future__ import annotations

import masked_jobs as jobs
import pytest
from rank_setup import Setup

from fusco import Settings
from generator import KINDS

pytestmark = pytest.mark.multirank

WORLDS = [(1, 1), (2, 2), (2, 1), (4, 4), (6, 3), (8, 8), (8, 4)]
SMALL = Settings(timeout_s=60.0, slice_bytes=64)  # slices of a few rows, so that some have none left to sum


@pytest.mark.parametrize(("num_ranks", "ranks_per_node"), WORLDS)
@pytest.mark.parametrize("settings", [SMALL, Setup(ranks_per_node=1).settings], ids=["slices", "attached"])
def test_rows_of_each_expert_are_apart(world, num_ranks, ranks_per_node, settings):
    balancer = "scattered" if settings is SMALL else "lanes"
    setup = Setup(ranks_per_node=ranks_per_node, balancer=balancer, settings=settings)
    world.run(jobs.check_masked, num_ranks, setup, range(len(KINDS)))


@pytest.mark.parametrize(("num_ranks", "ranks_per_node"), [(1, 1), (4, 2)])
@pytest.mark.parametrize("weighted_by", ["combine", "experts"])
def test_gradients_of_masked_rows(world, num_ranks, ranks_per_node, weighted_by):
    setup = Setup(ranks_per_node=ranks_per_node)
    world.run(jobs.check_gradients, num_ranks, setup, range(len(KINDS)), weighted_by)


@pytest.mark.parametrize(("num_ranks", "ranks_per_node"), [(2, 2), (4, 2)])
def test_an_expert_with_too_many_rows_is_named(world, num_ranks, ranks_per_node):
    world.run(jobs.check_overflow, num_ranks, Setup(ranks_per_node=ranks_per_node))
