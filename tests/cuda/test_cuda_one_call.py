"""Waiting for one call on a GPU: neither for those behind it, nor too little."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from one_rank import OneRank, case_of

import fusco
from comparison import assert_same_bits
from fusco import Launch, StaticRows
from generator import values

pytestmark = pytest.mark.cuda

OWN = Launch(own_stream=True)
HIDDEN = 40
_SLEEP_CYCLES = 4_000_000_000  # two seconds or more on any GPU: far longer than what does not wait for it


class Batch:
    """Inputs of one micro-batch on the device, and its twin's plan."""

    def __init__(self, one: OneRank, seed: int) -> None:
        self.case = case_of("ragged with holes", seed, num_topk=6, max_tokens=200)
        self.on_cpu = values((self.case.num_tokens(0), HIDDEN), torch.bfloat16, seed, "x")
        self.x, self.ids = self.on_cpu.to(one.device), self.case.topk_idx(0).to(one.device)
        self.weights = self.case.topk_weights(0).to(one.device)
        self.plan = one.plan(self.case)
        self.static = StaticRows(self.plan.num_slots_needed)

    def dispatch(self, one: OneRank, launch: Launch) -> fusco.Dispatched:
        return one.comm.dispatch(self.x, self.ids, self.weights, with_weights=True, static=self.static, launch=launch)

    def check_sum(self, one: OneRank, out: torch.Tensor, y: torch.Tensor) -> None:
        expected = one.twin_of_combine(self.case, y, self.plan, self.case.topk_weights(0))
        assert_same_bits(out.cpu(), expected, "combine and its twin")


def two_micro_batches(one: OneRank, batches: list[Batch]) -> list[tuple[fusco.Dispatched, torch.Tensor]]:
    """Dispatch and combine, each waited for by itself; results may be read on the current stream."""
    sent = [batch.dispatch(one, OWN) for batch in batches]
    events, outs = [torch.cuda.Event() for _ in batches], []
    for of_batch, event in zip(sent, events, strict=True):
        of_batch.wait()
        y = of_batch.rows * 2
        outs.append(one.comm.combine(y, of_batch.handle, launch=Launch(own_stream=True, event=event)))
    for event in events:
        event.wait()
    return list(zip(sent, outs, strict=True))


def check(one: OneRank, batches: list[Batch], results: list[tuple[fusco.Dispatched, torch.Tensor]]) -> None:
    for batch, (sent, out) in zip(batches, results, strict=True):
        y = sent.rows.cpu() * 2
        batch.check_sum(one, out, y)
        one.check_rows(sent.payloads, [batch.on_cpu], batch.plan)


def test_two_micro_batches(one: OneRank):
    for seed in range(0, 10, 2):
        batches = [Batch(one, seed), Batch(one, seed + 1)]
        check(one, batches, two_micro_batches(one, batches))
    one.comm.synchronize()


def test_two_micro_batches_in_a_graph(one: OneRank):
    batches = [Batch(one, 1), Batch(one, 2)]
    two_micro_batches(one, batches)  # compiles and loads the kernels, which a capture may not
    torch.cuda.synchronize(one.device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = two_micro_batches(one, batches)
    for _ in range(2):
        graph.replay()
        torch.cuda.synchronize(one.device)
        check(one, batches, results)
    one.comm.synchronize()


def dispatch(one: OneRank, batch: Batch, _handle: fusco.Handle, launch: Launch) -> None:
    batch.dispatch(one, launch)


def dispatch_again(one: OneRank, batch: Batch, handle: fusco.Handle, launch: Launch) -> None:
    one.comm.dispatch_again(batch.x, handle, launch=launch)


def combine(one: OneRank, batch: Batch, handle: fusco.Handle, launch: Launch) -> None:
    y = torch.ones(batch.static.num_rows, HIDDEN, dtype=torch.bfloat16, device=one.device)
    one.comm.combine(y, handle, launch=launch)


@pytest.mark.parametrize("second_call", [dispatch, dispatch_again, combine])
def test_waiting_for_the_first_call_does_not_wait_for_the_second(
    one: OneRank, second_call: Callable[[OneRank, Batch, fusco.Handle, Launch], None]
):
    batch, blocked = Batch(one, 3), torch.cuda.Stream(one.device)
    handle = batch.dispatch(one, OWN).handle
    second_call(one, batch, handle, OWN)  # compiles and loads the kernels, for which the device may have to be idle
    torch.cuda.synchronize(one.device)
    read, has_ended = torch.cuda.Event(), torch.cuda.Event()
    first = batch.dispatch(one, OWN)
    blocked.wait_stream(torch.cuda.current_stream(one.device))
    with torch.cuda.stream(blocked):
        torch.cuda._sleep(_SLEEP_CYCLES)
        second_call(one, batch, handle, Launch(own_stream=True, event=has_ended))
    first.wait()
    rows = first.rows.clone()
    read.record()
    read.synchronize()
    assert not has_ended.query()
    one.check_rows([rows], [batch.on_cpu], batch.plan)
    one.comm.synchronize()
    assert has_ended.query()
