"""A rank drops or aborts its communicator, forks, or uses it in two threads: errors on the other ranks."""

from __future__ import annotations

import re

import lifecycle_jobs as jobs
import pytest

from fusco.bench.ranks.local_world import LocalWorld

pytestmark = [pytest.mark.multirank, pytest.mark.cpu_only]

AT_ONCE_S = 5.0  # a loaded machine's milliseconds; a quarter of the limit


@pytest.mark.parametrize(
    ("how", "why", "ranks_per_node"),
    [
        ("drop", "rank 1 left: its communicator was dropped without being closed", 1),
        ("abort", "rank 1 left its communicator", 2),
    ],
)
def test_a_wait_for_a_rank_that_has_left_fails_at_once(world, how, why, ranks_per_node):
    (text, peers, took_s), _ = world.run(jobs.drop, 2, ranks_per_node, how)
    assert peers == (1,), text
    assert why in text
    assert took_s < AT_ONCE_S


@pytest.mark.parametrize("ranks_per_node", [1, 2])
@pytest.mark.parametrize("how", ["close", "abort"])
def test_a_signal_handler_may_end_a_communicator_in_the_middle_of_a_call(world, ranks_per_node, how):
    outcomes = world.run(jobs.end_in_a_handler, 2, ranks_per_node, how)
    assert [outcome[0] for outcome in outcomes] == ["PeerFailureError", "ClosedError"], outcomes
    assert (
        f"rank 1 {how.rstrip('e')}ed its communicator in the middle of dispatch, in a signal handler" in outcomes[0][1]
    )
    assert all(took_s < AT_ONCE_S and num_left <= 0 for *_, took_s, num_left in outcomes), outcomes


@pytest.mark.parametrize("ranks_per_node", [1, 2])
def test_close_does_not_wait_for_a_rank_that_has_left(world, ranks_per_node):
    assert max(world.run(jobs.drop_while_others_close, 2, ranks_per_node)) < AT_ONCE_S


@pytest.mark.parametrize("ranks_per_node", [1, 2])
def test_close_does_not_wait_for_a_rank_that_closed_too_early(world, ranks_per_node):
    for text, took_s in world.run(jobs.close_while_others_call, 2, ranks_per_node):
        assert text == "ranks call different collectives: dispatch on rank 0, close on rank 1"
        assert took_s < AT_ONCE_S


@pytest.mark.parametrize("ranks_per_node", [1, 2])
@pytest.mark.parametrize("how", ["raises", "aborts"])
def test_a_refusal_counts_though_its_rank_left_before_it_was_seen(world, ranks_per_node, how):
    assert world.run(jobs.refuse_and_end, 2, ranks_per_node, how)[0] == "RejectedInputError"


def test_a_refusal_counts_though_its_process_ended_before_it_was_seen():
    with LocalWorld(2) as world:
        world.start(jobs.refuse_and_end, 2, 1, "exits")
        assert world.results([0]) == ["RejectedInputError"]


def test_all_ranks_learn_at_once_of_one_whose_rails_refuse(world):
    for rank, (text, took_s) in enumerate(world.run(jobs.refuse_rails, 4)):
        assert "rank 0: " in text, (rank, text)
        assert re.search(r"rail 0 \(lo, 127.0.0.1 to 127.0.0.1:\d+\): the other end refused the handshake", text), (
            rank,
            text,
        )
        assert took_s < jobs.TIMEOUT_S - 2.0, (rank, took_s, text)  # they are compiled once


@pytest.mark.parametrize("ranks_per_node", [1, 2])
def test_a_forked_process_does_not_notify_the_other_ranks(world, ranks_per_node):
    assert world.run(jobs.fork_inside, 2, ranks_per_node) == [(0, 2.0), (0, 2.0)]


def test_of_two_threads_one_is_rejected_and_the_other_gets_its_rows(world):
    for num_right, num_wrong, errors in world.run(jobs.share_between_threads, 2, 2):
        assert (num_right, num_wrong, len(errors)) == (jobs.NUM_ROUNDS, 0, 1)
        assert "'thread 3'" in errors[0]
        assert "'thread 5'" in errors[0]


@pytest.mark.parametrize("ranks_per_node", [1, 4])
def test_sizes_and_experts_change_among_the_ranks_that_are_left(world, ranks_per_node):
    every, left = (0, 1, 2, 3), (0, 1, 2)
    assert world.run(jobs.resize, 4, ranks_per_node) == [[every, left]] * 3 + [[every]]
