"""Outputs of a fixed size: rows that do not fit are dropped on their rank, and all others continue."""

from __future__ import annotations

import pytest
import static_jobs as jobs
from rank_setup import Setup

from fusco import Settings
from generator import KINDS

pytestmark = pytest.mark.multirank


@pytest.mark.parametrize(("num_ranks", "ranks_per_node"), [(1, 1), (2, 2), (4, 2), (4, 4)])
def test_rows_that_do_not_fit_are_dropped(world, num_ranks, ranks_per_node):
    # Slices of a few rows, so that some have none left to sum.
    settings = Settings(timeout_s=30.0, slice_bytes=64)
    setup = Setup(ranks_per_node=ranks_per_node, balancer="scattered", settings=settings)
    world.run(jobs.check_drops, num_ranks, setup, range(len(KINDS)))
