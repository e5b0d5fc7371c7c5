"""Ranks go on without those that failed or left, and take in new ones; all results are right."""

import multiprocessing
import os
import signal
from contextlib import contextmanager

import pytest
from elastic_jobs import (
    JoinRequest,
    Served,
    join_and_serve,
    leave_and_rejoin,
    leave_on_purpose,
    serve,
    wait_until_all_work,
)
from fault_jobs import Fault, die, no_op, stop
from membership_jobs import (
    demand_too_many,
    find_lost_experts,
    limit_one_call,
    make_mistakes_without_rank_0,
    move_to_new_owners,
    refuse_mistakes,
    refuse_while_graphs_live,
    shrink_after_a_grow_that_failed,
    shrink_amid_a_place,
)
from rank_setup import Setup

import fusco
from fusco.bench.ranks.local_world import LocalWorld

pytestmark = [pytest.mark.multirank, pytest.mark.alone, pytest.mark.cpu_only, pytest.mark.timeout(240)]

TIMEOUT_S = 4.0
NEXT_STEP_S, SLACK_S = 1.0, 1.5  # after a kill, and what a loaded machine adds
LIMIT_S = 60.0
NUM_ROUNDS = 4

DISPATCHING = "fusco.cpu.dispatch:ScatterRows.step"
FOLDING = "fusco.cpu.combine:FoldSums.step"
RECORDS = "fusco.control.record_exchange:RecordExchange.exchange_records"
PROPOSING = "fusco.control.agreement:Agreement._propose"
GATHERING = "fusco.control.member_gather:MemberGather.all_gather"
CLOSING = "fusco.api.elastic:Elastic._go_on"

# Where ranks die: world, ranks of a node, victims, the method, its calls before.
PLACES = {
    "before a call": (4, 4, (2,), RECORDS, 2),
    "in a dispatch": (3, 3, (0,), DISPATCHING, 1),
    "in a combine between nodes": (4, 2, (3,), FOLDING, 2),
    "two at once": (6, 6, (1, 3), RECORDS, 3),
    "a whole node": (4, 2, (0, 1), RECORDS, 3),
    "one of each node": (6, 3, (2, 4), RECORDS, 3),
}


def setup_of(ranks_per_node, **options):
    settings = fusco.Settings(timeout_s=TIMEOUT_S, slice_bytes=1 << 12)
    return Setup(ranks_per_node=ranks_per_node, num_experts=12, num_topk=4, settings=settings, **options)


@contextmanager
def world_of(num_ranks):
    with LocalWorld(num_ranks) as world:
        world.run(no_op, num_ranks)
        try:
            yield world
        finally:
            world.kill()


def results(world, ranks):
    outcomes = world.collect(list(ranks), timeout_s=LIMIT_S)
    for is_ok, outcome in outcomes:
        assert is_ok, getattr(outcome, "traceback", outcome)
    return {rank: outcome for rank, (_, outcome) in zip(ranks, outcomes, strict=True)}


def assert_right_soon(served, left, struck_at, within_s=NEXT_STEP_S + SLACK_S):
    for each in served.values():
        assert each.ranks == tuple(left), each
        assert each.failures[-1]["right_at"] - struck_at < within_s, each
        assert each.still_held == []


@pytest.mark.parametrize("place", PLACES)
def test_survivors_go_on_right_within_a_second(tmp_path, place):
    num_ranks, ranks_per_node, victims, where, num_calls = PLACES[place]
    fault = Fault(how=die, victims=victims, where=where, num_calls_before=num_calls, times=tmp_path)
    left = [rank for rank in range(num_ranks) if rank not in victims]
    with world_of(num_ranks) as world:
        arguments = (setup_of(ranks_per_node), len(left), NUM_ROUNDS, tmp_path, place)
        world.start(serve, num_ranks, *arguments, fault=fault)
        served = results(world, left)
    assert_right_soon(served, left, fault.struck_at)
    for each in served.values():
        assert {peer for failure in each.failures for peer in failure["peers"]} == set(victims)


@pytest.mark.parametrize("where", [PROPOSING, GATHERING, CLOSING])
def test_a_rank_that_dies_while_others_shrink_is_left_out_too(tmp_path, where):
    fault = Fault(how=die, victims=(2,), where=where, times=tmp_path)
    with world_of(4) as world:
        world.start(serve, 4, setup_of(4), 2, NUM_ROUNDS, tmp_path, where, fault=fault)
        wait_until_all_work(tmp_path, 4)
        world.processes[1].kill()
        served = results(world, (0, 3))
    assert_right_soon(served, (0, 3), fault.struck_at)


def test_a_stopped_rank_is_left_out_and_learns_it(tmp_path):
    fault = Fault(how=stop, victims=(1,), where=RECORDS, num_calls_before=2, times=tmp_path)
    with world_of(4) as world:
        world.start(serve, 4, setup_of(2), 3, NUM_ROUNDS, tmp_path, "stopped", fault=fault)
        served = results(world, (0, 2, 3))
        os.kill(world.processes[1].pid, signal.SIGCONT)
        [out] = results(world, (1,)).values()
    assert_right_soon(served, (0, 2, 3), fault.struck_at, within_s=TIMEOUT_S + 0.3 + SLACK_S)
    assert "go on without it" in out.excluded
    assert out.still_held == []


def test_a_rank_that_stops_in_grow_is_not_waited_for_again_in_shrink(tmp_path):
    fault = Fault(how=stop, victims=(1,), where=GATHERING, times=tmp_path)
    with world_of(3) as world:
        world.start(shrink_after_a_grow_that_failed, 3, setup_of(3), fault)
        for named, gone, seconds in results(world, (0, 2)).values():
            assert named == gone == (1,)
            assert seconds < SLACK_S


@pytest.mark.parametrize(("num_ranks", "ranks_per_node", "leaving"), [(4, 4, (3,)), (4, 2, (0, 1)), (4, 1, (0,))])
def test_ranks_leave_on_purpose(world, num_ranks, ranks_per_node, leaving):
    served = world.run(leave_on_purpose, num_ranks, setup_of(ranks_per_node), leaving, "leaving")
    left = tuple(rank for rank in range(num_ranks) if rank not in leaving)
    assert [each.ranks for each in served] == [() if rank in leaving else left for rank in range(num_ranks)]
    assert [each.still_held for each in served] == [[]] * num_ranks


def test_rows_of_lost_experts_go_nowhere_and_are_counted(world):
    assert world.run(find_lost_experts, 4) == [True] * 4


def test_once_members_have_changed_errors_name_ranks_by_their_numbers_in_the_group(world):
    _, *of_members = world.run(make_mistakes_without_rank_0, 4)
    splits = "rank 3 sends 0 rows to rank 1, which expects 1; rank 3 sends 2 rows to rank 2, which expects 1"
    mismatch = f"ranks disagree in all_to_all: {splits}"
    assert of_members[0] == [mismatch]
    assert of_members[1] == [
        mismatch,
        "gather_send to rank 3: this rank has 8 bytes of segments, that rank has 4 bytes",
    ]
    overflow, *others = of_members[2]
    assert overflow.startswith("rank 3 needed 3 expert-major rows")
    assert others == [mismatch, "scatter_recv from rank 2: this rank has 4 bytes of segments, that rank has 8 bytes"]


def test_members_follow_the_lowest_rank_if_a_place_was_interrupted(world):
    left = [(1, -1), (0, 3), (2, -1), (-1, -1)]
    assert world.run(shrink_amid_a_place, 4) == [left, left, left, []]


def test_lost_experts_get_new_owners(world):
    assert world.run(move_to_new_owners, 4) == [True] * 4


def test_too_few_that_are_left_raise_and_may_try_again():
    with world_of(3) as world:
        world.start(demand_too_many, 3)
        assert results(world, (0, 1)) == {0: True, 1: True}


def test_mistakes_change_nothing(world):
    assert world.run(refuse_mistakes, 4) == [True] * 4


def test_members_change_once_graphs_are_deleted():
    with world_of(4) as world:
        world.start(refuse_while_graphs_live, 4, world.store.port)
        assert list(results(world, range(4)).values()) == [True] * 4


@pytest.mark.parametrize("by_argument", [False, True])
def test_a_call_may_have_a_limit_of_its_own_and_the_communicator_keeps_its_own(world, by_argument):
    for rank, (elapsed_s, waited_s) in enumerate(world.run(limit_one_call, 4, by_argument=by_argument)):
        assert elapsed_s < TIMEOUT_S
        assert rank == 2 or waited_s > 1.0


@pytest.mark.parametrize(("num_ranks", "ranks_per_node", "victim"), [(4, 4, 2), (4, 2, 0), (3, 1, 1)])
def test_a_new_process_takes_the_place_of_a_dead_one(tmp_path, num_ranks, ranks_per_node, victim):
    left, everyone = [rank for rank in range(num_ranks) if rank != victim], tuple(range(num_ranks))
    setup = setup_of(ranks_per_node)
    with world_of(num_ranks) as world:
        world.start(serve, num_ranks, setup, len(left), NUM_ROUNDS, tmp_path, "joining", grows=True)
        wait_until_all_work(tmp_path, num_ranks)
        context = multiprocessing.get_context("forkserver")
        receiver, sender = context.Pipe()
        request = JoinRequest(port=world.store.port, num_ranks=num_ranks, signs=tmp_path)
        arguments = (request, setup, NUM_ROUNDS, sender, "joining")
        process = context.Process(target=join_and_serve, args=arguments, daemon=True)
        world.processes[victim].kill()
        process.start()
        sender.close()
        served = results(world, left)
        joined = receiver.recv()
        process.join()
    assert [each.ranks for each in served.values()] == [everyone] * len(left)
    assert [each.still_held for each in served.values()] == [[]] * len(left)
    assert joined == Served(ranks=everyone)


@pytest.mark.parametrize("where", [PROPOSING, GATHERING])
def test_a_process_that_dies_while_it_joins_is_named_and_the_next_one_joins(tmp_path, where):
    left, setup, everyone = (0, 1, 3), setup_of(2), (0, 1, 2, 3)
    fault = Fault(how=die, victims=(2,), where=where, num_calls_before=int(where == GATHERING), times=tmp_path)
    with world_of(4) as world:
        world.start(serve, 4, setup, len(left), NUM_ROUNDS, tmp_path, "joining", grows=True)
        wait_until_all_work(tmp_path, 4)
        world.processes[2].kill()
        context = multiprocessing.get_context("forkserver")
        for each in (fault, None):
            receiver, sender = context.Pipe()
            request = JoinRequest(port=world.store.port, num_ranks=4, signs=tmp_path, fault=each)
            arguments = (request, setup, NUM_ROUNDS, sender, "joining")
            process = context.Process(target=join_and_serve, args=arguments, daemon=True)
            process.start()
            sender.close()
            if each:
                process.join()
        served = results(world, left)
        assert receiver.recv() == Served(ranks=everyone)
    named = set()
    for each in served.values():
        assert (each.ranks, each.still_held) == (everyone, [])
        assert len(each.failures) > 1, each.failures
        named |= {peer for failure in each.failures[1:] for peer in failure["peers"]}
    assert 2 in named  # not by each: one that is late may learn it from another, which shrinks already


def test_leaving_and_joining_again_and_again_holds_no_more():
    with world_of(3) as world:
        world.start(leave_and_rejoin, 3, setup_of(3), 6, world.store.port)
        held = results(world, range(3))
    for _, first, *_, last in held.values():
        assert (first.descriptors, first.mappings) == (last.descriptors, last.mappings)
