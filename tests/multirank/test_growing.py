"""Communicators without a maximum number of tokens grow on all ranks; profiles are counted over all their calls."""

from __future__ import annotations

import growing_jobs as jobs
import pytest

pytestmark = [pytest.mark.multirank, pytest.mark.cpu_only]


@pytest.mark.parametrize(("num_ranks", "ranks_per_node"), [(2, 2), (2, 1), (4, 2)])
def test_a_communicator_that_has_grown_gives_what_a_large_one_gives(world, num_ranks, ranks_per_node):
    assert world.run(jobs.same_as_fixed, num_ranks, ranks_per_node) == [[256, 512, 1024, 1024, 1024]] * num_ranks


@pytest.mark.parametrize("ranks_per_node", [1, 2])
def test_a_placement_holds_in_a_larger_size(world, ranks_per_node):
    world.run(jobs.after_place, 2, ranks_per_node)


@pytest.mark.parametrize("ranks_per_node", [1, 2])
def test_ranks_that_are_out_of_step_raise_at_once(world, ranks_per_node):
    first, second = world.run(jobs.out_of_step, 2, ranks_per_node)
    for text in (*first[:2], *second[:2]):
        assert text.startswith("MismatchError: ranks call different collectives: "), text
    assert "larger dispatch on rank 0" in first[0]
    assert "along a handle of 256 tokens, size 0 on rank 1" in first[1]
    assert first[2].startswith("ValueError")
    assert second[2].startswith("RejectedInputError")
    assert second[3].startswith(
        "ValueError: a token is 17 values of float32, 68 bytes as it travels, but the communicator was made for "
        "hidden=16 of float32: make it with"
    )
    assert first[3].startswith("RejectedInputError")
    assert first[4].startswith("PeerFailureError")
    assert "rank 1 left its communicator" in first[4]


def test_sizes_are_fixed_once_members_have_changed(world):
    *texts, last = world.run(jobs.shrink_when_grown, 4)
    assert all("700 tokens, but the communicator was made for max_tokens_per_rank=512" in text for text in texts)
    assert not last


@pytest.mark.parametrize("ranks_per_node", [1, 2])
def test_hooks_count_calls_of_all_sizes(world, ranks_per_node):
    for calls, num_bytes in world.run(jobs.counted, 2, ranks_per_node):
        assert calls == {"dispatch": 2, "combine": 2}
        assert num_bytes > 0
