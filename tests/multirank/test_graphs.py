"""CUDA graphs of calls: captured once and replayed on all ranks, within a node and between nodes."""

from __future__ import annotations

import os
import signal

import graph_jobs as jobs
import pytest
import torch
from on_device import load, skip_without_gpus
from rank_setup import Setup

from fusco import Settings, Topology
from fusco.ranks.emulation import emulated_network
from fusco.ranks.local_world import LocalWorld

pytestmark = [pytest.mark.multirank, pytest.mark.cuda_only]
KINDS = ["balanced", "balanced", "skewed", "skewed", "balanced", "skewed"]


@pytest.mark.parametrize(("num_ranks", "ranks_per_node"), [(2, 1), (4, 2), (4, 1)])
@pytest.mark.parametrize("slice_bytes", [1 << 16, 256])
def test_replays_have_the_bits_of_exact_calls(world, num_ranks, ranks_per_node, slice_bytes):
    settings = Settings(timeout_s=30.0, slice_bytes=slice_bytes)
    # With another balancer other ranks may forward, and round.
    setup = Setup(ranks_per_node=ranks_per_node, num_topk=4, balancer="static", settings=settings)
    world.run(jobs.check_replays, num_ranks, setup, KINDS)


@pytest.mark.parametrize(("num_ranks", "ranks_per_node"), [(2, 1), (4, 2)])
def test_replays_of_masked_rows_have_the_bits_of_exact_calls(world, num_ranks, ranks_per_node):
    setup = Setup(ranks_per_node=ranks_per_node, num_topk=4, balancer="static", settings=Settings(timeout_s=30.0))
    world.run(jobs.check_replays, num_ranks, setup, KINDS, is_masked=True)


def test_a_replay_tells_of_messages_that_were_too_small(world, world_of):
    if world_of == "cuda":
        pytest.skip("within a node there are no messages")
    setup = Setup(ranks_per_node=1, num_topk=4, settings=Settings(timeout_s=30.0))
    world.run(jobs.check_overflows, 2, setup)


@pytest.mark.parametrize("ranks_per_node", [1, 2])
def test_a_rank_that_dies_while_nodes_replay_is_named_and_nothing_hangs(ranks_per_node):
    num_ranks, victim = 2 * ranks_per_node, 1
    skip_without_gpus(num_ranks)
    topology = Topology.of_equal_nodes(num_ranks, ranks_per_node)
    setup = Setup(ranks_per_node=ranks_per_node, num_topk=4, settings=Settings(timeout_s=20.0 * load()), device="cuda")
    survivors = [rank for rank in range(num_ranks) if rank != victim]
    world = LocalWorld(num_ranks, "cuda", emulated_network(topology, os.environ, torch.cuda.device_count()))
    try:
        world.start(jobs.replay_until_death, num_ranks, setup, victim)
        results = world.results(survivors, timeout_s=60 * load())
    finally:
        os.kill(world.processes[victim].pid, signal.SIGKILL)
        world.close()
    for named, took_s, closing_s in results:
        assert named == (victim,)
        assert took_s < 5.0 * load(), "less than the time limit, by far"
        assert closing_s < 8.0 * load()
    assert [world.processes[rank].exitcode for rank in survivors] == [0] * len(survivors)
