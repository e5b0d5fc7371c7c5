"""Repeated calls leave every error as it is: of other ranks, of interruptions, and of devices."""

from __future__ import annotations

import ctypes
import threading
import time
from unittest import mock

import numpy as np
import pytest
from repeated_rig import LIMIT_S, NODES, TOPOLOGY, Node, inputs, pair, same

from fusco import ClosedError, MismatchError, PeerFailureError, RejectedInputError, RowOverflowError
from fusco.control.machine_calls import address_of, libc_address
from fusco.cuda.kernels import program as programs
from fusco.cuda.kernels.comm import Report
from fusco.cuda.kernels.library import Kernel
from fusco.cuda.kernels.program import NOT_REPORTED, NativeCall, Program
from played_network import PlayedNetwork

AFTER_AN_INTERRUPTION = {
    "dispatch": lambda comm: pair(comm, 5),
    "dispatch of other sizes": lambda comm: pair(comm, 5, num_tokens=3),
    "shuffle": lambda comm: comm.shuffle({}, {}),
}


def test_ranks_that_repeat_another_call_notice(repeats):
    def program(comm, other, _library):
        sent = [pair(comm, step)[0] for step in range(4)]
        mistaken = (lambda: comm.combine(sent[-1].rows, sent[-1].handle), lambda: pair(comm, 4))[comm.rank]
        with pytest.raises(MismatchError, match=r"combine on rank 0, dispatch on rank 1"):
            mistaken()
        with pytest.raises(MismatchError, match="handle is"):
            comm.combine(sent[comm.rank].rows, sent[comm.rank].handle)
        assert same(pair(comm, 5), pair(other, 5))

    Node().run(program)
    assert repeats() == (2 * 3, 2 * 3)


@pytest.mark.parametrize("verb", [*AFTER_AN_INTERRUPTION, "close"])
def test_after_an_interruption_no_call_takes_the_published_record_of_another(verb, monkeypatch):
    """As Ctrl-C may come between a repeated call that other ranks cannot follow and the full one."""

    def program(comm, _other, _library):
        repeat = comm._repeats.dispatch

        def interrupt(*arguments):
            assert repeat(*arguments) is None
            raise KeyboardInterrupt

        sent = [pair(comm, step)[0] for step in range(4)][-1]
        if comm.rank == 1:
            with pytest.raises(MismatchError, match="dispatch on rank 0, combine on rank 1"):
                comm.combine(sent.rows, sent.handle)
            with pytest.raises(PeerFailureError, match=r"rank 0 was interrupted in dispatch #9"):
                pair(comm, 5)
            return
        with monkeypatch.context() as patch:
            patch.setattr(comm._repeats, "dispatch", interrupt)
            with pytest.raises(KeyboardInterrupt):
                pair(comm, 4)
        if verb == "close":
            comm.close()
            return
        with pytest.raises(ClosedError, match=r"interrupted in dispatch #9, after it had published its input"):
            AFTER_AN_INTERRUPTION[verb](comm)

    Node().run(program)


def test_an_overflow_is_raised_by_the_call_after_it():
    def program(comm, _other, _library):
        for step in range(4):
            pair(comm, step)
        comm._engine._arena.report.overflow_limit, comm._engine._arena.report.overflow_needed = 3, 4
        with pytest.raises((RowOverflowError, RejectedInputError), match=r"needed 4 expert-major rows"):
            pair(comm, 4)

    Node().run(program)


def test_the_call_that_fails_is_named_among_many():
    named = []
    calls = [
        NativeCall(
            libc_address("abs"), (13 * (number == 299),), lambda error, number=number: named.append((number, error))
        )
        for number in range(300)
    ]
    Program(calls, 1, 0, 0).launch(0)
    assert named == [(299, 13)]


def test_a_wait_for_a_report_on_a_busy_core_ends_before_the_next_look_for_dead_ranks():
    yields = []
    busy = ctypes.CFUNCTYPE(ctypes.c_int)(lambda: yields.append(time.sleep(0.005)) or 0)  # as sched_yield takes there
    report = np.zeros(ctypes.sizeof(Report) // 8, np.int64)
    launches = Program([], 1, 0, report.ctypes.data)
    launches._words[programs._YIELD] = address_of(busy)
    assert launches.wait(1) == NOT_REPORTED
    assert 1 < len(yields) < 7


@pytest.mark.parametrize("topology", [TOPOLOGY, NODES], ids=["a node", "two nodes"])
def test_a_late_rank_is_waited_for_and_a_dead_one_is_not(topology, repeats):
    def program(comm, other, _library):
        for step in range(6):
            time.sleep(0.01 * (step % 2 == comm.rank))
            assert same(pair(comm, step), pair(other, step))
        if comm.rank:
            return None
        with pytest.raises(PeerFailureError, match=r"dispatch #13.*records of node \d") as raised:
            pair(comm, 6)
        return raised.value.peers

    results = {}
    over = threading.Event()

    def on_its_own(comm, other, library):
        try:
            results[comm.rank] = program(comm, other, library)
        finally:
            if comm.rank == 0:
                over.set()
            over.wait(LIMIT_S)
            comm._session.broken = other._session.broken = "the test is over"

    Node(limit_s=2.0, topology=topology).run(on_its_own)
    assert results == {0: (1,), 1: None}
    expected = 2 * (4 if topology is TOPOLOGY else 3)  # between nodes, the first dispatch counts its rows
    assert repeats() == (expected, expected)


def test_a_kernel_that_cannot_be_launched_ends_the_communicator():
    def program(comm, _other, library):
        for step in range(4):
            pair(comm, step)
        library.fails = True
        with pytest.raises(RuntimeError, match="plan: 1"):
            pair(comm, 4)
        library.fails = False
        profile = comm.profile
        assert (profile.operation, profile.planning_s, profile.wire_s, profile.num_sms) == ("dispatch #9", 0, 0, 0)
        with pytest.raises(Exception, match="cannot be used any more"):
            pair(comm, 5)

    with mock.patch.object(Kernel, "error", lambda kernel, result: RuntimeError(f"{kernel.name}: {result}")):
        Node().run(program)


@pytest.mark.parametrize("is_repeated", [True, False])
def test_a_communicator_may_be_closed_by_a_signal_handler_while_it_waits(is_repeated):
    def program(comm, _other, _library):
        for step in range(4 if is_repeated else 1):
            pair(comm, step)
        if comm.rank:
            over.wait(LIMIT_S)
            return
        polls = iter(range(3))
        network = PlayedNetwork(poll=lambda: next(polls, -1) == 2 and comm.abort() is not None)
        comm._session._watchdog.watch_network(network, {}, polls=True)
        try:
            with pytest.raises(ClosedError, match="aborted its communicator in the middle of dispatch"):
                pair(comm, 4)
        finally:
            over.set()

    over = threading.Event()
    Node().run(program)


def test_a_call_that_is_interrupted_after_it_was_announced_ends_the_communicator():
    def program(comm, _other, _library):
        for step in range(4):
            pair(comm, step)
        x, ids, weights = inputs(comm.rank, 4)
        if comm.rank:  # its record is another one, so rank 0 does not repeat its call any more
            with pytest.raises(ValueError, match="the routing 8 tokens"):
                comm.dispatch(x[:7], ids, weights)
            return
        validator = comm._validator
        comm._validator = mock.Mock(validate_dispatch=mock.Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            comm.dispatch(x, ids, weights)
        comm._validator = validator
        with pytest.raises(ClosedError, match="failed in dispatch: KeyboardInterrupt"):
            comm.dispatch(x, ids, weights)

    Node().run(program)


def test_an_alignment_that_makes_more_rows_than_kernels_count_is_refused():
    def program(comm, _other, _library):
        x, ids, weights = inputs(comm.rank, 0)
        few = 2**31 // 3  # for each of three experts
        with pytest.raises(ValueError, match=rf"expert_alignment={few} may pad this rank's rows to 2147483\d+, more"):
            comm.dispatch(x, ids, weights, expert_alignment=few)

    Node().run(program)
