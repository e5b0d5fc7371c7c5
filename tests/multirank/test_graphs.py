"""CUDA graphs of calls: captured once and replayed on all ranks, within a node and between nodes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import contextmanager
from typing import Any

import graph_jobs as jobs
import pytest
import torch
from on_device import load, skip_without_gpus
from rank_setup import Setup

from fusco import Settings, Topology
from fusco.bench.ranks.emulation import emulated_network
from fusco.bench.ranks.local_world import LocalWorld

pytestmark = [pytest.mark.multirank, pytest.mark.cuda_only]
# Of four ranks: the experts of rank 2 that ranks 0 and 1 have, too.
PLACES = [[*range(6), 12, 13], [*range(6, 12), 14, 15], [*range(12, 18), -1, -1], [*range(18, 24), -1, -1]]
KINDS = ["balanced", "balanced", "skewed", "skewed", "balanced", "skewed"]


@contextmanager
def deadly_world(num_ranks: int, ranks_per_node: int, victims: Sequence[int], **options: Any):
    """Processes of which some die, and the setup of a communicator; in the end the victims are dead in any case."""
    skip_without_gpus(num_ranks)
    settings = Settings(timeout_s=20.0 * load())
    setup = Setup(ranks_per_node=ranks_per_node, num_topk=4, settings=settings, device="cuda", **options)
    topology = Topology.of_equal_nodes(num_ranks, ranks_per_node)
    world = LocalWorld(num_ranks, "cuda", emulated_network(topology, os.environ, torch.cuda.device_count()))
    try:
        yield world, setup
    finally:
        for victim in victims:
            world.processes[victim].kill()
        world.close()


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
    with deadly_world(num_ranks, ranks_per_node, [victim]) as (world, setup):
        world.start(jobs.replay_until_death, num_ranks, setup, victim)
        survivors = [rank for rank in range(num_ranks) if rank != victim]
        results = world.results(survivors, timeout_s=60 * load())
    for named, took_s, closing_s in results:
        assert named == (victim,)
        assert took_s < 5.0 * load(), "less than the time limit, by far"
        assert closing_s < 8.0 * load()
    assert [world.processes[rank].exitcode for rank in survivors] == [0] * len(survivors)


@pytest.mark.parametrize("expert_placement", [None, PLACES], ids=["without replicas", "with replicas"])
def test_replays_go_on_within_a_node_without_ranks_that_die(expert_placement):
    num_ranks, victims = 4, (2, 0)
    with deadly_world(num_ranks, num_ranks, victims, expert_placement=expert_placement) as (world, setup):
        world.start(jobs.replay_without_the_dead, num_ranks, setup, victims)
        for gone, num_live in world.results([1, 3], timeout_s=150 * load()):
            assert gone == [(2,), (2,), (0,), (0,)]
            assert num_live == [1, 1, 1, 0]


def test_between_nodes_shrink_refuses_as_long_as_graphs_live():
    num_ranks, victim = 3, 1
    with deadly_world(num_ranks, 1, [victim]) as (world, setup):
        world.start(jobs.shrink_once_graphs_are_deleted, num_ranks, setup, victim)
        assert world.results([0, 2], timeout_s=120 * load()) == [(victim,)] * 2
