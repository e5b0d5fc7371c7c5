"""Reuse of handles, padding, several communicators at once, outputs that outlive their communicator."""

from __future__ import annotations

import dataclasses

import handle_jobs as jobs
import pytest
from rank_setup import Setup

from fusco import Settings

pytestmark = pytest.mark.multirank

SETUP = Setup(ranks_per_node=2, num_experts=12, num_topk=4, settings=Settings(timeout_s=60.0, slice_bytes=1))


@pytest.mark.parametrize("ranks_per_node", [2, 4])
def test_a_handle_is_valid_for_any_number_of_calls(world, ranks_per_node):
    world.run(jobs.check_reuse, 4, dataclasses.replace(SETUP, ranks_per_node=ranks_per_node))


def test_padding_is_zero_and_counts_do_not_count_it(world):
    world.run(jobs.check_alignment, 4, SETUP, [1, 2, 8, 13, 128])


def test_two_communicators_of_one_group_in_turn(world):
    other = Setup(ranks_per_node=1, num_experts=4, num_topk=2, balancer="rotation", max_bytes_per_token=64)
    world.run(jobs.check_two_communicators, 4, [SETUP, other, SETUP])


@pytest.mark.cpu_only
def test_outputs_outlive_their_communicator_and_their_memory_is_used_again(world):
    assert world.run(jobs.outputs_after_close, 4, SETUP) == [(True, True)] * 4
