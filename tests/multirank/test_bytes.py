"""Bytes sent between and within nodes, and bytes of memory, compared with the expected numbers."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from byte_jobs import count_bytes, memory_taken
from rank_setup import Setup

from fusco import Settings
from generator import KINDS

pytestmark = [pytest.mark.multirank, pytest.mark.cpu_only]

HIDDEN = 7
SETUP = Setup(ranks_per_node=2, num_topk=6, settings=Settings(timeout_s=60.0, slice_bytes=100))


@pytest.mark.parametrize(("num_nodes", "ranks_per_node"), [(2, 2), (4, 1), (3, 2), (1, 4)])
def test_each_row_is_sent_once_to_each_remote_node(world, num_nodes, ranks_per_node):
    setup = dataclasses.replace(SETUP, ranks_per_node=ranks_per_node)
    counts = world.run(count_bytes, num_nodes * ranks_per_node, setup, list(KINDS), HIDDEN)
    row_bytes = counts[0].internode_rows * HIDDEN * 2
    assert sum(rank.dispatched for rank in counts) == row_bytes
    assert sum(rank.combined for rank in counts) == row_bytes
    assert [rank.dispatched for rank in counts] == [rank.planned for rank in counts]
    assert [rank.intranode for rank in counts] == [rank.planned_intranode for rank in counts]
    assert (row_bytes > 0) == (num_nodes > 1)


def test_partial_sums_in_float32_take_twice_the_bytes(world):
    settings = dataclasses.replace(SETUP.settings, wire_dtype=torch.float32)
    counts = world.run(count_bytes, 4, dataclasses.replace(SETUP, settings=settings), ["ragged"], HIDDEN)
    assert sum(rank.combined for rank in counts) == 2 * sum(rank.dispatched for rank in counts) > 0


def test_metadata_is_less_than_a_twentieth_of_the_rows(world):
    setup = Setup(ranks_per_node=2, num_experts=32, num_topk=8, max_tokens=1024, max_bytes_per_token=8192)
    counts = world.run(count_bytes, 4, setup, ["balanced"], 4096, 8)
    assert sum(rank.dispatched for rank in counts) == counts[0].internode_rows * 8192
    assert 0 < sum(rank.metadata for rank in counts) < 0.05 * sum(rank.dispatched for rank in counts)


@pytest.mark.parametrize(("num_ranks", "ranks_per_node"), [(1, 1), (4, 2), (4, 1), (4, 4)])
def test_memory_is_as_the_hint(world, num_ranks, ranks_per_node):
    for shared, private, hint in world.run(
        memory_taken, num_ranks, dataclasses.replace(SETUP, ranks_per_node=ranks_per_node)
    ):
        assert (shared, private) == (hint.shared_bytes, hint.private_bytes)
