"""``all_to_all`` gives what ``all_to_all_single`` gives, bit for bit, and says what is wrong when something is."""

from __future__ import annotations

import dataclasses

import all_to_all_jobs as jobs
import pytest
from rank_setup import Setup

from fusco import Settings

pytestmark = pytest.mark.multirank

# Slots of 64 bytes, two of each ring: most messages take many slices.
SETUP = Setup(
    ranks_per_node=2,
    num_topk=1,
    max_bytes_per_token=16,
    settings=Settings(timeout_s=60.0, slice_bytes=1, ring_depth=2),
)
MISTAKEN = 2
PROMPTLY_S = 5.0


@pytest.mark.parametrize(("num_ranks", "ranks_per_node"), [(4, 2), (8, 2), (6, 2), (4, 4), (4, 1), (1, 1), (8, 4)])
def test_every_matrix_by_every_schedule(world, num_ranks, ranks_per_node):
    world.run(jobs.check_exchanges, num_ranks, dataclasses.replace(SETUP, ranks_per_node=ranks_per_node))
