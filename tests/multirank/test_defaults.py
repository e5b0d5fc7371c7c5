"""Results do not depend on PyTorch's defaults for new tensors, which belong to the caller."""

from __future__ import annotations

import default_jobs as jobs
import pytest
import torch

pytestmark = [pytest.mark.multirank, pytest.mark.cpu_only]

JOBS = [jobs.run_moe_layer, jobs.run_byte_collectives]


@pytest.mark.parametrize("job", JOBS)
def test_defaults_for_new_tensors_change_nothing(world, job):
    usual = world.run(job, 4, None, torch.float32)
    assert len({str(of_rank) for of_rank in usual}) == 4  # each rank has different data
    assert world.run(job, 4, "meta", torch.float32) == usual
    assert world.run(job, 4, None, torch.float64) == usual
    assert world.run(job, 4, "meta", torch.bfloat16) == usual
