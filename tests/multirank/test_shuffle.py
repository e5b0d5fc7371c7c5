"""``shuffle``, ``gather_send`` and ``scatter_recv``: segments of any sizes arrive, and nothing else changes."""

from __future__ import annotations

import dataclasses

import pytest
import shuffle_jobs as jobs
from rank_setup import Setup

from fusco import Settings

pytestmark = pytest.mark.multirank

# Slots of 128 bytes, two of each ring: most payloads take many slices.
SETUP = Setup(
    ranks_per_node=2,
    num_experts=24,
    num_topk=3,
    max_tokens=20,
    max_bytes_per_token=64,
    settings=Settings(timeout_s=40.0, slice_bytes=1, ring_depth=2),
)
PROMPTLY_S = 5.0


def setup_of(ranks_per_node, **changes):
    settings = dataclasses.replace(SETUP.settings, **changes)
    return dataclasses.replace(SETUP, ranks_per_node=ranks_per_node, settings=settings)


@pytest.mark.parametrize(
    ("num_ranks", "ranks_per_node"),
    [(1, 1), (2, 1), (4, 1), (4, 4), (8, 2), pytest.param(8, 4, marks=pytest.mark.cuda_only)],
)
def test_segments_of_unequal_sizes_among_all_ranks(world, num_ranks, ranks_per_node):
    sizes = [0, 1, 127, 128, 129, 1000, 5000]
    world.run(jobs.check_shuffles, num_ranks, setup_of(ranks_per_node), sizes, 300)


@pytest.mark.parametrize("changes", [{"slice_bytes": 1 << 20}, {"slice_bytes": 4096, "ring_depth": 5}], ids=str)
def test_slices_larger_than_segments(world, changes):
    world.run(jobs.check_shuffles, 4, setup_of(2, **changes), [0, 100, 20_000], 50)


def test_segments_larger_than_slices(world):
    world.run(jobs.check_shuffles, 4, setup_of(2), [9000], 9000)


def test_nothing_at_all(world):
    world.run(jobs.check_shuffles, 4, setup_of(2), [0], 10)


def test_ranks_that_come_late(world):
    world.run(jobs.check_shuffles, 4, setup_of(2), [0, 700, 3000], 300, 20)


@pytest.mark.parametrize("ranks_per_node", [1, 2])
def test_between_two_ranks(world, ranks_per_node):
    world.run(jobs.check_pairs, 4, setup_of(ranks_per_node), [0, 1, 128, 3001], 400)


@pytest.mark.cpu_only
def test_a_backward_pass_that_needs_what_was_overwritten_raises(world):
    for errors in world.run(jobs.reads_of_overwritten_memory, 2, dataclasses.replace(SETUP, ranks_per_node=1)):
        assert len(errors) == 3
        assert all("modified by an inplace operation" in error for error in errors), errors


def test_several_senders_to_one_rank(world):
    world.run(jobs.overlap_senders, 4, setup_of(2))


@pytest.mark.parametrize(("src", "dst"), [(0, 1), (3, 0)], ids=["within a node", "between nodes"])
def test_two_ranks_that_expect_different_sizes_both_raise(world, src, dst):
    outcomes = world.run(jobs.send_mismatched, 4, setup_of(2), src, dst)
    for rank in (src, dst):
        assert outcomes[rank].kind == "MismatchError"
        assert "100 bytes" in outcomes[rank].text
        assert "101" in outcomes[rank].text
        assert outcomes[rank].seconds < PROMPTLY_S


@pytest.mark.parametrize("ranks_per_node", [1, 2])
def test_two_ranks_that_both_send_or_both_receive_raise(world, ranks_per_node):
    for rank, (sending, receiving) in enumerate(world.run(jobs.move_the_same_way, 2, setup_of(ranks_per_node))):
        assert (sending.kind, receiving.kind) == ("MismatchError", "MismatchError")
        assert sending.text == f"gather_send to rank {1 - rank}: that rank calls gather_send, too"
        assert receiving.text == f"scatter_recv from rank {1 - rank}: that rank calls scatter_recv, too"


def test_a_shuffle_whose_sizes_differ_fails_on_all_ranks_and_moves_nothing(world):
    for outcome, is_untouched in world.run(jobs.shuffle_mismatched, 4, setup_of(2)):
        assert outcome.kind == "MismatchError"
        assert "rank 0 sends 11 bytes to rank 1, which expects 10" in outcome.text
        assert outcome.seconds < PROMPTLY_S
        assert is_untouched


def test_peers_that_are_no_other_rank_and_payloads_that_are_none(world):
    for outcomes in world.run(jobs.name_wrong_peers, 4, setup_of(2)):
        assert [outcome.kind for outcome in outcomes] == ["ValueError"] * 4 + ["TypeError"] * 4


def test_ranks_of_a_node_share_what_one_of_them_sends(world, world_of):
    sent = world.run(jobs.bytes_sent_for_one_rank, 4, setup_of(2), 10_000)
    assert sent == ([0, 0, 0, 0] if world_of == "cuda" else [10_000, 10_000, 0, 0])


@pytest.mark.parametrize("balancer", ["static", "send-and-receive"])
def test_without_lanes_every_rank_sends_its_segments(world, balancer):
    setup = dataclasses.replace(setup_of(2), balancer=balancer)
    assert world.run(jobs.bytes_sent_for_one_rank, 4, setup, 10_000)[1] == 0
