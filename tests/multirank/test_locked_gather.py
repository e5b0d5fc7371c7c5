"""All-gathers of members end although ranks that are through hold the interpreter's lock, and so answer nothing."""

from __future__ import annotations

import locked_gather_jobs as jobs
import pytest

pytestmark = [pytest.mark.multirank, pytest.mark.cpu_only]


@pytest.mark.parametrize("reminder_s", [0.0, 0.2])
def test_ranks_that_wait_with_the_lock_held_have_answered(world, tmp_path, reminder_s):
    received = world.run(jobs.receive_after_gathers, 4, tmp_path, reminder_s)
    assert received == [3 * jobs.NUM_ROUNDS] * 4
