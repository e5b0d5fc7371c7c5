"""Masks of DeepEP's low-latency mode: ranks that are left go on with right rows and sums."""

from __future__ import annotations

import mask_jobs
import pytest
from test_elastic import results, world_of

pytestmark = [pytest.mark.multirank, pytest.mark.alone, pytest.mark.cpu_only, pytest.mark.timeout(240)]


@pytest.mark.parametrize("how", ["at the first dispatch", "in a combine"])
def test_ranks_that_fail_are_masked_and_the_call_is_made_without_them(how):
    with world_of(4) as world:
        world.start(mask_jobs.lose_ranks, 4, how)
        assert results(world, (0, 1, 2)) == {0: True, 1: False, 2: True}


def test_a_late_rank_is_masked_learns_it_and_comes_back():
    with world_of(4) as world:
        assert world.run(mask_jobs.lose_a_late_rank_for_a_while, 4) == [True] * 4


def test_a_rank_is_masked_on_purpose_and_comes_back():
    with world_of(4) as world:
        assert world.run(mask_jobs.mask_on_purpose, 4) == [True] * 4
