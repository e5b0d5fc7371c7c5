"""Repeated calls return what others return, bit for bit."""

from __future__ import annotations

import threading
from unittest import mock

import numpy as np
import pytest
import torch
from repeated_rig import (
    CASES,
    HIDDEN,
    MAX_TOKENS,
    NODES,
    NUM_EXPERTS,
    NUM_RANKS,
    NUM_TOPK,
    TOPOLOGY,
    Node,
    inputs,
    pair,
    same,
)

from fusco import RejectedInputError
from fusco.core.rows import allocator_of


@pytest.mark.parametrize(
    ("case", "no_bound"),
    [*((case, False) for case in CASES), ("exact", True), ("two payloads", True)],
    indirect=["no_bound"],
)
@pytest.mark.usefixtures("no_bound")
def test_repeated_calls_return_what_others_do(case, repeats):
    def program(comm, other, _library):
        for step in range(6):
            made = [pair(each, step, **CASES[case]) for each in (comm, other)]
            assert same(*made), step
        assert comm.profile.operation == "combine #12"
        return comm.profile.num_sms

    assert set(Node().run(program).values()) == {132}
    # The first call is validated in full, the second, which is like it, is kept.
    assert repeats() == (2 * 4, 2 * 4)


def test_results_outlive_later_calls(repeats):
    def program(comm, _other, _library):
        made = [pair(comm, step) for step in range(40)]
        for step, (sent, out) in enumerate(made):
            assert torch.equal(comm.combine(sent.rows * 2, sent.handle), out), step
        counts = [sent.num_rows_per_expert for sent, _ in made]
        assert len({each.data_ptr() for each in counts}) == len(counts)
        made[20][0].num_rows_per_expert.fill_(-1)  # a caller may
        assert (counts[19] >= 0).all()
        assert (counts[21] >= 0).all()

    Node().run(program)
    assert repeats()[0] == 2 * 38


def test_gradients_flow_through_repeated_calls(repeats, repeats_along_plans):
    def program(comm, other, _library):
        def gradients(of, step):
            x, ids, weights = inputs(of.rank, step)
            x.requires_grad_()
            weights.requires_grad_()
            sent = of.dispatch(x, ids, weights, with_weights=step >= 6)
            rows = sent.rows.sin() if sent.weights is None else sent.rows.sin() * sent.weights[:, None]
            of.combine(rows, sent.handle).square().sum().backward()
            return x.grad, weights.grad

        for step in range(11):
            assert all(map(torch.equal, gradients(comm, step), gradients(other, step)))

    Node().run(program)
    # Dispatches with weights are not repeated. Each step has three combines: forward, and those of the gradients of
    # weights and of rows, from step 6 on with those of their weights.
    assert repeats() == (2 * 4, 2 * (9 + 9 + 4 + 3))
    assert repeats_along_plans() == 2 * 9


@pytest.mark.parametrize("topology", [TOPOLOGY, NODES], ids=["a node", "two nodes"])
@pytest.mark.parametrize("rank", range(NUM_RANKS))
def test_a_rejected_input_is_told_to_ranks_that_repeat(rank, topology, repeats):
    def program(comm, other, _library):
        for step in range(4):
            pair(comm, step)
        x, ids, weights = inputs(comm.rank, 4)
        with pytest.raises(ValueError if comm.rank == rank else RejectedInputError, match="the routing 8 tokens"):
            comm.dispatch(x[:7] if comm.rank == rank else x, ids, weights)
        assert same(pair(comm, 5), pair(other, 5))
        ids[3, 1] = NUM_EXPERTS if comm.rank == rank else 0
        with pytest.raises(ValueError if comm.rank == rank else RejectedInputError, match=r"topk_idx\[3, 1\] = 6"):
            comm.dispatch(x, ids, weights)
        assert same(pair(comm, 6), pair(other, 6))

    Node(topology=topology).run(program)
    assert repeats()[0] == 2 * (5 if topology is TOPOLOGY else 4)  # between nodes, the first one counts its rows


@pytest.mark.parametrize("options", [{"launch": 0}, {"static": np.zeros(2)}, {"with_weights": torch.ones(2)}])
def test_options_of_other_types_are_refused_where_calls_repeat(options):
    def program(comm, other, _library):
        for step in range(4):
            pair(comm, step)
        wrong = options if comm.rank else {}
        with pytest.raises((TypeError, RuntimeError) if comm.rank else RejectedInputError):
            comm.dispatch(*inputs(comm.rank, 4), **wrong)
        assert same(pair(comm, 5), pair(other, 5))

    Node().run(program)


def test_addresses_that_kernels_cannot_use_are_no_repetition(repeats):
    def program(comm, other, _library):
        def misaligned(each, step):
            x, ids, weights = inputs(each.rank, step)
            memory = torch.empty(x.numel() + 1)
            sent = each.dispatch(memory[1:].view(x.shape).copy_(x), ids, weights)
            rows = torch.empty(sent.rows.numel() + 1)[1:].view(sent.rows.shape).copy_(sent.rows)
            return sent, each.combine(rows, sent.handle)

        for step in range(4):
            pair(comm, step)
        for step in range(3):
            assert same(misaligned(comm, step), misaligned(other, step))

    Node().run(program)
    assert repeats() == (2 * 2, 2 * 2)


def test_rows_that_are_contiguous_only_if_there_is_one_are_no_repetition(repeats):
    def program(comm, other, _library):
        def with_rows(each, num_rows):
            x = torch.arange(MAX_TOKENS * HIDDEN, dtype=torch.float32).view(MAX_TOKENS, HIDDEN)
            ids = torch.full((MAX_TOKENS, NUM_TOPK), -1)
            ids[:num_rows, 0] = each.rank * NUM_EXPERTS // NUM_RANKS
            sent = each.dispatch(x, ids)
            columns = torch.cat([sent.rows, -sent.rows], 1)[:, :HIDDEN]
            return sent, each.combine(columns, sent.handle)

        for num_rows in (1, 1, 1, 1, 5, 0, 5):
            assert same(*(with_rows(each, num_rows) for each in (comm, other))), num_rows

    Node().run(program)
    assert repeats() == (2 * 5, 2 * 3)


def test_results_of_a_subclass_are_of_it_in_every_call(repeats):
    class Named(torch.Tensor):
        pass

    def program(comm, _other, _library):
        for step in range(5):
            x, ids, weights = inputs(comm.rank, step)
            sent = comm.dispatch(x.as_subclass(Named), ids, weights)
            assert isinstance(sent.rows, Named)
            assert isinstance(comm.combine(sent.rows, sent.handle), Named)

    Node().run(program)
    assert repeats() == (0, 0)


def test_unused_rows_of_repeated_calls_are_filled_if_pytorch_is_deterministic():
    def program(comm, _other, _library):
        made = [comm.dispatch(*inputs(comm.rank, step), **CASES["static"]) for step in range(5)]
        return all(bool(sent.rows[-1].isnan().all()) for sent in made)

    torch.use_deterministic_algorithms(True)
    try:
        assert all(Node().run(program).values())
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("verb", ["dispatch", "combine", "dispatch_again", "combine_all"])
def test_a_rank_without_memory_for_an_output_does_not_repeat(verb):
    allocate, short = allocator_of(torch.device("cpu")), threading.local()

    def without_memory(*shape):
        if getattr(short, "times", 0):
            short.times -= 1
            raise torch.OutOfMemoryError("no room")
        return allocate(*shape)

    def program(comm, _other, _library):
        for step in range(4):
            sent, _ = pair(comm, step)
        (x, ids, weights), rows = inputs(comm.rank, 4), sent.rows * 2
        call = {
            "dispatch": lambda: comm.dispatch(x, ids, weights).rows,
            "combine": lambda: comm.combine(rows, sent.handle),
            "dispatch_again": lambda: comm.dispatch_again(x, sent.handle)[0],
            "combine_all": lambda: comm.combine_all([rows], sent.handle)[0],
        }[verb]
        for _ in range(4):
            expected = call()
        short.times = 1 - comm.rank
        assert torch.equal(call(), expected)
        assert short.times == 0

    with mock.patch("fusco.cuda.within_node.programs.allocator_of", return_value=without_memory):
        Node().run(program)


def test_tickets_wrap_around(repeats):
    def program(comm, other, _library):
        for each in (comm, other):
            each._engine._shuffle._planner.ticket = 2**32 - 4
        for step in range(6):
            assert same(pair(comm, step), pair(other, step)), step

    Node().run(program)
    assert repeats()[0] > 0
