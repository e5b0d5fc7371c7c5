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


def test_objects_are_described_in_a_line_and_the_first_rank_logs_what_was_made(world):
    described = world.run(jobs.describe, 4)
    what = "cpu, nodes 2 x 2, experts 8, top-2, at most 4 tokens of 12 bytes"
    for rank, (texts, _) in enumerate(described):
        rows = {0: 16, 2: 16}.get(rank, 0)
        assert texts == [
            f"Communicator(rank {rank} of 4, {what})",
            f"Dispatched(bfloat16[{rows}, 6] on cpu, 2 local experts)",
            f"Handle(of dispatch #1, 4 tokens, {rows} rows)",
            f"Communicator(rank {rank} of 4, {what}, closed)",
        ]
    (line,), *others = (records for _, records in described)
    assert line.startswith(f"communicator (rank 0 of 4, {what}) over shared memory and TCP on the default interface, ")
    assert ", balancer static, 0.0" in line
    assert others == [[], [], []]
