"""Four nodes of four ranks, in a separate world."""

import pytest
import torch
from rank_setup import Setup
from routing_jobs import check_routings
from shuffle_jobs import check_shuffles

from fusco import Settings
from fusco.bench.ranks.local_world import LocalWorld
from generator import KINDS

pytestmark = [pytest.mark.multirank, pytest.mark.cpu_only]


def test_sixteen_ranks_on_four_nodes():
    setup = Setup(
        ranks_per_node=4,
        num_experts=64,
        max_tokens=12,
        max_bytes_per_token=64,
        settings=Settings(timeout_s=120.0, slice_bytes=1, ring_depth=2),
    )
    with LocalWorld(16) as world:
        world.run(check_routings, 16, setup, torch.float32, range(len(KINDS)))
        world.run(check_shuffles, 16, setup, [0, 1, 700], 200)
