"""Repeated calls between nodes return what others return, bit for bit, and leave every error as it is."""

from __future__ import annotations

import gc
from unittest import mock

import pytest
import torch
from repeated_rig import CASES, HIDDEN, MAX_TOKENS, NODES, NUM_RANKS, NUM_TOPK, Node, inputs, is_undefined, pair, same

from fusco import MismatchError, PeerFailureError, RowOverflowError, StaticRows, Topology, TransportError
from fusco.core.errors import Stall


@pytest.mark.parametrize(
    ("case", "no_bound"),
    [*((case, False) for case in CASES), ("exact", True), ("two payloads", True)],
    indirect=["no_bound"],
)
@pytest.mark.usefixtures("no_bound")
def test_repeated_calls_between_nodes_return_what_others_do(case, repeats):
    def program(comm, other, _library):
        for step in range(7):
            made = [pair(each, step, **CASES[case]) for each in (comm, other)]
            assert same(*made), step
        ours, theirs = comm.profile, other.profile
        for name in ("internode_row_bytes", "internode_empty_bytes", "internode_metadata_bytes", "num_sms"):
            assert getattr(ours, name) == getattr(theirs, name), name
        assert ours.operation == "combine #14"
        x, (sent, _) = inputs(comm.rank, 9)[0], made[0]
        moved = [each.dispatch_again(x, of[0].handle)[0] for each, of in zip((comm, other), made, strict=True)]
        assert torch.equal(*(rows[~is_undefined(sent)] for rows in moved))

    Node(topology=NODES).run(program)
    # The rows of the first exact dispatch are counted: the second one is the first with a program.
    expected = 2 * (5 if "static" in CASES[case] else 4)
    assert repeats() == (expected, expected)


def test_static_rows_between_nodes_of_three_ranks_are_repeated(repeats):
    options = {"static": StaticRows(6 * MAX_TOKENS * NUM_TOPK)}

    def program(comm, other, _library):
        for step in range(4):
            assert same(*(pair(each, step, **options) for each in (comm, other))), step

    Node(topology=Topology.of_equal_nodes(6, 3)).run(program)
    assert repeats() == (6 * 2, 6 * 2)


def test_a_rank_whose_slices_are_copied_repeats_nothing_and_others_do(repeats):
    def program(comm, other, _library):
        for step in range(6):
            assert same(*(pair(each, step, num_tokens=4) for each in (comm, other))), step  # more are two slices

    Node(topology=Topology.of_equal_nodes(3, 1)).run(program)
    assert repeats() == (2 * 3, 2 * 3)  # the rows of ranks 0 and 2 do not follow each other


def test_rows_that_no_token_fills_are_counted_again_if_there_are_many(repeats):
    def program(comm, other, _library):
        for step in range(12):
            x, ids, weights = inputs(comm.rank, step)
            if step in (5, 6):  # no expert on another node
                ids = ids % 3 + 3 * comm.rank
            made = []
            for each in (comm, other):
                sent = each.dispatch(x, ids, weights)
                made.append((sent, each.combine(sent.rows, sent.handle)))
            assert same(*made), step
        return comm.profile.internode_empty_bytes

    with mock.patch("fusco.cuda.between_nodes.message_rows.MAX_EMPTY_BYTES", 6 * HIDDEN * 4):
        Node(topology=NODES).run(program)
    # In step 6, after one with many empty rows, rows are counted, and in step 7; steps 8 and 9 are the next that are
    # alike.
    assert 2 * 3 <= repeats()[0] < 2 * 8


@pytest.mark.parametrize("name", ["ncclSend", "ncclGroupEnd"])
def test_messages_that_nccl_refuses_end_the_communicator(name):
    def program(comm, _other, _library):
        for step in range(5):
            pair(comm, step)
        comm._engine._network._nccl.fails_at = name
        with pytest.raises((TransportError, PeerFailureError), match=r"NCCL failed in .*: error 3"):
            pair(comm, 5)
        with pytest.raises(Exception, match="cannot be used any more"):
            pair(comm, 6)

    Node(topology=NODES).run(program)


def test_messages_after_an_abort_of_nccl_are_an_error():
    def program(comm, _other, _library):
        for step in range(5):
            pair(comm, step)
        network = comm._engine._network
        stall = Stall("the network", (1 - comm.rank,), "slice 0", "nothing")
        network.nccl_watchdog._give_up(stall)
        comm._engine._arena._abort.value = 0  # as if it were aborted after the record was published
        with pytest.raises(PeerFailureError, match="slice 0"):
            pair(comm, 5)

    Node(topology=NODES, limit_s=5.0).run(program)


def test_an_overflow_of_messages_is_raised_by_the_call_after_it(repeats):
    static = StaticRows(NUM_RANKS * MAX_TOKENS * NUM_TOPK, max_rows_to_node=3)

    def program(comm, _other, _library):
        x, _, weights = inputs(comm.rank, 0)
        here, there = (torch.tensor([[3 * rank, 3 * rank + 1]] * MAX_TOKENS) for rank in (comm.rank, 1 - comm.rank))
        for ids in (here, here, here, here, there):
            comm.dispatch(x, ids, weights, static=static)
        with pytest.raises(RowOverflowError, match=str(MAX_TOKENS)):
            comm.dispatch(x, here, weights, static=static)

    Node(topology=NODES).run(program)
    assert repeats()[0] == 2 * 3


@pytest.mark.parametrize(("case", "max_bytes"), [("exact", 1 << 20), ("exact", 0), ("static", 1 << 20)])
def test_a_combine_has_its_memory_when_a_dispatch_that_waits_for_its_plan_returns(case, max_bytes):
    def program(comm, other, _library):
        for step in range(6):
            assert same(*(pair(each, step, **CASES[case]) for each in (comm, other))), step
        x, ids, weights = inputs(comm.rank, 6)
        sent = comm.dispatch(x, ids, weights, **CASES[case])
        plan = sent.handle.plan
        early = plan.allocated[1][1] if plan.allocated else None
        assert (early is not None) == (case == "exact" and max_bytes > 0)
        rows = sent.rows.nan_to_num()
        first, second = (comm.combine(rows, sent.handle) for _ in range(2))
        assert plan.allocated is None
        assert early is None or first.data_ptr() == early.data_ptr() != second.data_ptr()
        assert torch.equal(first, second)
        return sent.handle

    with mock.patch("fusco.cuda.between_nodes.sum_program._MAX_EARLY_BYTES", max_bytes):
        handles = Node(topology=NODES).run(program)
    gc.collect()
    assert all(handle.plan.made_by() is None for handle in handles.values())  # a handle keeps no communicator's memory


def test_a_combine_that_is_not_repeated_after_all_keeps_no_memory():
    def num_tensors_kept(is_mistaken):
        def program(comm, _other, _library):
            made = [pair(comm, step)[0] for step in range(6)]
            if is_mistaken:
                of_rank = made[-1 - comm.rank]  # records differ, which shows once they are published
                with pytest.raises(MismatchError, match="handle is"):
                    comm.combine(of_rank.rows, of_rank.handle)
            return comm

        comms = Node(topology=NODES).run(program)
        gc.collect()
        assert len(comms) == NUM_RANKS
        return sum(type(each) is torch.Tensor for each in gc.get_objects())

    gc.collect()
    assert num_tensors_kept(is_mistaken=True) <= num_tensors_kept(is_mistaken=False)


def test_dispatches_that_no_combine_follows_soon_allocate_nothing_for_one():
    def program(comm, _other, _library):
        for step in range(5):
            pair(comm, step)
        x, ids, weights = inputs(comm.rank, 5)
        handles = [comm.dispatch(x, ids, weights).handle for _ in range(9)]
        ahead = [handle.plan.allocated is not None for handle in handles]
        pair(comm, 6)
        return ahead, comm.dispatch(x, ids, weights).handle.plan.allocated is not None

    for ahead, after_a_combine in Node(topology=NODES).run(program).values():
        assert ahead == [True] * 4 + [False] * 5
        assert after_a_combine
