"""``all_to_all`` equals ``all_to_all_single`` bit for bit, and names invalid arguments."""

from __future__ import annotations

import dataclasses
import time

import all_to_all_jobs as jobs
import pytest
from rank_setup import Setup

from fusco import Settings
from fusco.bench.ranks.local_world import LocalWorld

pytestmark = pytest.mark.multirank

# Slots of 64 bytes, two of each ring: most messages take many slices.
SETUP = Setup(
    ranks_per_node=2, num_topk=1, max_bytes_per_token=16, settings=Settings(timeout_s=60.0, slice_bytes=1, ring_depth=2)
)
MISTAKEN = 2
PROMPTLY_S = 5.0


@pytest.mark.parametrize(("num_ranks", "ranks_per_node"), [(6, 2), (8, 4), (4, 4), (4, 1), (1, 1)])
def test_every_matrix_by_every_schedule(world, num_ranks, ranks_per_node):
    world.run(jobs.check_exchanges, num_ranks, dataclasses.replace(SETUP, ranks_per_node=ranks_per_node))


def test_ranks_that_come_late(world):
    world.run(jobs.check_exchanges, 4, SETUP, 5)


@pytest.mark.parametrize(("slice_bytes", "num_rows"), [(1 << 12, 3000), (1 << 20, 30_000)])
def test_messages_of_many_slices_and_then_other_collectives(world, slice_bytes, num_rows):
    settings = Settings(timeout_s=60.0, slice_bytes=slice_bytes, ring_depth=3)
    world.run(jobs.exchange_much, 4, dataclasses.replace(SETUP, settings=settings), num_rows)


def test_equal_splits_and_rows_that_are_not_contiguous(world):
    world.run(jobs.exchange_equally, 4, SETUP)


@pytest.mark.parametrize(("num_ranks", "ranks_per_node"), [(2, 2), (4, 2), (4, 1)])
def test_gradients_equal_those_of_torch(world, num_ranks, ranks_per_node):
    world.run(jobs.check_gradients, num_ranks, dataclasses.replace(SETUP, ranks_per_node=ranks_per_node))


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_graphs(world, num_ranks):
    world.run(jobs.check_graphs, num_ranks, SETUP)


# The invalid call, the error of its rank and that of all others, and phrases of all texts.
MISTAKES = [
    (jobs.sends_more, "MismatchError", "MismatchError", ["rank 2 sends 5 rows to rank 1, which expects 2"]),
    (jobs.other_dtype, "MismatchError", "MismatchError", ["float64[3] on rank 2", "float32[3] on ranks 0, 1, 3"]),
    (jobs.other_row, "MismatchError", "MismatchError", ["float32[6] on rank 2", "float32[3] on ranks 0, 1, 3"]),
    (jobs.other_schedule, "MismatchError", "MismatchError", ["schedule is", "few on rank 2"]),
    (jobs.other_verb, "MismatchError", "MismatchError", ["shuffle on rank 2", "all_to_all on ranks 0, 1, 3"]),
    (jobs.no_tensor, "TypeError", "RejectedInputError", ["input must be a tensor, got list"]),
    (jobs.on_another_device, "ValueError", "RejectedInputError", ["input is on meta, the communicator on cpu"]),
    (jobs.without_dimension, "ValueError", "RejectedInputError", ["input has 0 dimensions"]),
    (jobs.rows_of_two_kinds, "ValueError", "RejectedInputError", ["rows of float32[3], input of float16[3]"]),
    (jobs.output_with_gaps, "ValueError", "RejectedInputError", ["output must be contiguous", "(6, 2)"]),
    (jobs.with_gradient, "ValueError", "RejectedInputError", ["pass None as output"]),
    (jobs.into_what_requires_gradients, "ValueError", "RejectedInputError", ["pass None as output"]),
    (jobs.wants_gradients_alone, "MismatchError", "MismatchError", ["requires_grad is", "True on rank 2"]),
    (jobs.huge_splits_without_output, "RuntimeError", "RejectedInputError", ["2305843009213693958"]),
    (jobs.in_place, "ValueError", "RejectedInputError", ["overlap in memory: 96 bytes"]),
    (jobs.unknown_schedule, "ValueError", "RejectedInputError", ["'exact', 'few', 'spread-out', got 'best'"]),
    (jobs.uneven_without_splits, "ValueError", "RejectedInputError", ["input has 7 rows", "4 ranks", "input_split_"]),
    (jobs.splits_of_halves, "TypeError", "RejectedInputError", ["input_split_sizes", "[2.5, 2, 2, 1.5]"]),
    (jobs.too_few_splits, "ValueError", "RejectedInputError", ["output_split_sizes has 3 entries", "4 ranks"]),
    (jobs.negative_split, "ValueError", "RejectedInputError", ["input_split_sizes", "negative, got -1"]),
    (jobs.splits_of_other_sum, "ValueError", "RejectedInputError", ["(2, 2, 2, 3) sum to 9", "input has 8 rows"]),
]


@pytest.mark.cpu_only
def test_a_mistake_is_named_on_all_ranks_and_all_continue(world):
    of_ranks = world.run(jobs.make_mistakes, 4, SETUP, MISTAKEN, [mistake for mistake, *_ in MISTAKES])
    for (_, kind, of_others, phrases), *outcomes in zip(MISTAKES, *of_ranks, strict=True):
        assert [outcome.kind for outcome in outcomes] == [kind if rank == MISTAKEN else of_others for rank in range(4)]
        assert all(phrase in outcome.text for outcome in outcomes for phrase in phrases), outcomes
        assert all(outcome.seconds < PROMPTLY_S for outcome in outcomes)


@pytest.mark.cpu_only
def test_without_a_communicator_and_ranks_that_just_exit():
    with LocalWorld(2, start_method="spawn") as new_world:  # interpreters end as those of a user
        for outcome in new_world.run(jobs.exchange_by_group, 2):
            assert outcome.kind == "ValueError"
            assert "not both" in outcome.text
        for while_open, afterwards in new_world.run(jobs.exchange_by_a_destroyed_group, 2):
            assert while_open
            assert len(afterwards) < len(while_open)
        stopped = time.monotonic()
    assert [process.exitcode for process in new_world.processes] == [0] * 2
    assert time.monotonic() - stopped < 10.0
