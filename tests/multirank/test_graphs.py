"""CUDA graphs of calls: captured once and replayed on all ranks, within a node and between nodes."""

from __future__ import annotations

import graph_jobs as jobs
import pytest
from rank_setup import Setup

from fusco import Settings

pytestmark = [pytest.mark.multirank, pytest.mark.cuda_only]
KINDS = ["balanced", "balanced", "skewed", "skewed", "balanced", "skewed"]


@pytest.mark.parametrize(("num_ranks", "ranks_per_node"), [(2, 1), (4, 2), (4, 1)])
@pytest.mark.parametrize("slice_bytes", [1 << 16, 256])
def test_replays_have_the_bits_of_exact_calls(world, num_ranks, ranks_per_node, slice_bytes):
    settings = Settings(timeout_s=30.0, slice_bytes=slice_bytes)
    # With another balancer other ranks may forward, and round.
    setup = Setup(ranks_per_node=ranks_per_node, num_topk=4, balancer="static", settings=settings)
    world.run(jobs.check_replays, num_ranks, setup, KINDS)


def test_a_replay_tells_of_messages_that_were_too_small(world, world_of):
    if world_of == "cuda":
        pytest.skip("within a node there are no messages")
    setup = Setup(ranks_per_node=1, num_topk=4, settings=Settings(timeout_s=30.0))
    world.run(jobs.check_overflows, 2, setup)
