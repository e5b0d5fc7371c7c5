"""Experts that move are where the new placement says, bit for bit; copies' gradients return; mistakes are named."""

from __future__ import annotations

import dataclasses
import re

import move_jobs as jobs
import pytest
from rank_setup import Setup

from comparison import assert_same_bits
from fusco import ExpertPlacement, Settings

pytestmark = pytest.mark.multirank

# Slots of 64 bytes, two of each ring: most experts take many slices.
SETUP = Setup(ranks_per_node=2, settings=Settings(timeout_s=60.0, slice_bytes=1, ring_depth=2))
WORLDS = [(4, 2), (6, 2), (4, 4), (4, 1), (1, 1), (8, 4)]


@pytest.mark.parametrize(("num_ranks", "ranks_per_node"), WORLDS)
def test_random_placements(world, num_ranks, ranks_per_node):
    world.run(jobs.check_moves, num_ranks, dataclasses.replace(SETUP, ranks_per_node=ranks_per_node), num_ranks, 8)


@pytest.mark.parametrize(
    ("num_ranks", "num_trainers", "is_apart"), [(4, 2, True), (6, 4, True), (4, 2, False), (2, 1, True)]
)
def test_owners_may_be_other_ranks(world, num_ranks, num_trainers, is_apart):
    world.run(jobs.refit, num_ranks, SETUP, num_trainers, is_apart)


@pytest.mark.parametrize(("num_ranks", "ranks_per_node"), [(8, 4), (6, 2), (4, 1)])
def test_an_expert_crosses_to_a_node_once(world, num_ranks, ranks_per_node):
    world.run(jobs.check_network_bytes, num_ranks, dataclasses.replace(SETUP, ranks_per_node=ranks_per_node))


@pytest.mark.parametrize(("num_ranks", "ranks_per_node"), [(4, 2), (2, 2)])
def test_one_rank_holds_all_back(world, num_ranks, ranks_per_node):
    held = world.run(jobs.hold_back, num_ranks, dataclasses.replace(SETUP, ranks_per_node=ranks_per_node))
    assert set(held) == {(0, 1)}


@pytest.mark.parametrize(("num_ranks", "ranks_per_node"), [(8, 4), (2, 1), (1, 1)])
def test_copies_of_a_batch_and_their_gradients(world, num_ranks, ranks_per_node):
    setup = dataclasses.replace(SETUP, ranks_per_node=ranks_per_node)
    for seed in range(2):
        first, second = (world.run(jobs.check_prefetch, num_ranks, setup, seed) for _ in range(2))
        for one, other in zip(first, second, strict=True):
            for grad, again in zip(one, other, strict=True):
                assert_same_bits(grad, again, "gradients of two runs")


def test_counts_of_more_than_16_bits_are_exchanged(world):
    """The high halves follow in a call of their own, where some are not 0."""
    placement = ExpertPlacement.contiguous(4, 2).in_places(3)
    setup = Setup(ranks_per_node=2, num_experts=4, num_topk=2, max_tokens=1 << 16, expert_placement=placement)
    for rows in ([1 << 16, 5], [65_535, 0], [7, 131_071]):
        assert world.run(jobs.counted_rows, 2, setup, rows) == [[rows[0], 0, rows[1], 0]] * 2


@pytest.mark.cpu_only  # a dispatch on CUDA comes behind its plan
@pytest.mark.parametrize(("num_ranks", "ranks_per_node"), [(4, 4), (4, 2), (2, 1), (1, 1)])
def test_counts_travel_with_the_dispatch_while_batches_are_even(world, num_ranks, ranks_per_node):
    """A batch that needs copies, and the one after it, take an exchange more."""
    placement = ExpertPlacement.contiguous(24, num_ranks).in_places(24 // num_ranks + 2)
    setup = Setup(ranks_per_node=ranks_per_node, expert_placement=placement)
    found = world.run(jobs.check_balanced_dispatches, num_ranks, setup, [0, 0, 16, 17, 0, 0])
    is_skewed = num_ranks > 1
    number = 2 if is_skewed else 1
    expected = [(1, False), (1, False), (number, is_skewed), (number, is_skewed), (number, False), (1, False)]
    assert found == [expected] * num_ranks


@pytest.mark.cpu_only
def test_ranks_balance_a_dispatch_together(world):
    placement = ExpertPlacement.contiguous(4, 2).in_places(3)
    setup = Setup(ranks_per_node=2, num_experts=4, num_topk=1, expert_placement=placement)
    for rank, (other, full) in enumerate(world.run(jobs.dispatch_without_balance, 2, setup, 1)):
        assert re.search(r"balance is .*Balance\(spare_places=1.* on rank 0", other), (rank, other)
        assert full.startswith(("3 spare places are asked for", "dispatch was cancelled")[rank]), full


MISTAKEN = 2


# The error of all ranks.
DIFFERENCES = [
    (jobs.other_old, r"old is 4 x 2 places \(\w+\) on ranks 0, 1, 3, 4 x 2 places \(\w+\) on rank 2"),
    (jobs.other_new, r"new is 4 x 2 places \(\w+\) on ranks 0, 1, 3"),
    (jobs.other_dtype, r"experts is float32\[3, 4\] on ranks 0, 1, 3, float64\[3, 4\] on rank 2"),
    (jobs.other_shape, r"float32\[2, 4\] on rank 2"),
    (jobs.other_steps, "step_bytes is not given on ranks 0, 1, 3, 1048576 on rank 2"),
    (jobs.other_verb, "different collectives: move_experts on ranks 0, 1, 3, shuffle on rank 2"),
]


def test_ranks_that_differ(world):
    of_ranks = world.run(jobs.make_mistakes, 4, SETUP, MISTAKEN, [mistake for mistake, _ in DIFFERENCES])
    for (_, text), *outcomes in zip(DIFFERENCES, *of_ranks, strict=True):
        for outcome in outcomes:
            assert outcome.kind == "MismatchError"
            assert re.search(text, outcome.text), outcome.text


MISTAKES = [
    (jobs.too_few_places, "ValueError", "weights[0] has shape (1, 3, 4), but this rank has 2 places"),
    (jobs.lost_expert, "ValueError", "new has expert(s) [9], which are on no rank in old"),
    (jobs.too_few_ranks, "ValueError", "old has 3 ranks, new has 3, the topology has 4"),
    (jobs.flat_placement, "TypeError", "old must have an integer for each place of each rank, got array([ 0, -1"),
    (jobs.one_tensor, "TypeError", "weights must be a sequence of tensors, got Tensor"),
    (jobs.on_another_device, "ValueError", "weights[0] is on meta, the communicator on "),
    (jobs.transposed, "ValueError", "contiguous rows that do not overlap, got strides (12, 1, 3)"),
    (jobs.without_weights, "ValueError", "rank 2 has experts [2, -1] in old, but no weights"),
    (jobs.other_targets, "ValueError", "weights are float32[3, 4] for each expert, targets float16[3, 4]"),
]


def test_mistakes_of_one_rank(world):
    of_ranks = world.run(jobs.make_mistakes, 4, SETUP, MISTAKEN, [mistake for mistake, *_ in MISTAKES])
    for (_, kind, text), *outcomes in zip(MISTAKES, *of_ranks, strict=True):
        for rank, outcome in enumerate(outcomes):
            assert outcome.kind == (kind if rank == MISTAKEN else "RejectedInputError"), outcome
            assert text in outcome.text
