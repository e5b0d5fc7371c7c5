"""Invalid expert ids within a node: each is reported as the error of the dispatch that had it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine_parts import engine_of
from simulated_device import Machine
from simulated_nodes import Rank, World, request_of

from fusco import Capacity, ExpertPlacement, RowOverflowError, Settings, StaticRows, Topology
from fusco.cuda.engine import CudaEngine
from fusco.cuda.memory.layout import DeviceLayout
from fusco.planner.routing import Routing

NUM_RANKS, NUM_EXPERTS, NUM_TOPK = 3, 6, 2
PLACEMENT = ExpertPlacement.contiguous(NUM_EXPERTS, NUM_RANKS)
RANGE = "is not an expert: ids go from 0 to 5, and -1 means none"
STATIC = StaticRows(64)


def ids(num_tokens: int) -> torch.Tensor:
    return torch.arange(num_tokens * NUM_TOPK).view(-1, NUM_TOPK) % NUM_EXPERTS


def with_bad_id(bad_id: int, token: int) -> torch.Tensor:
    wrong = ids(8)
    wrong[token, 1] = bad_id
    return wrong


def dispatch(at: Rank, topk_idx: torch.Tensor, static: StaticRows | None) -> Exception | None:
    request = request_of(Routing(topk_idx), torch.zeros(len(topk_idx), 4), PLACEMENT, static=static)
    try:
        at.dispatch(request)
    except (ValueError, RowOverflowError) as error:
        return error
    return None


def engine_at(at: Rank) -> CudaEngine:
    return engine_of(arena=at.arena, placement=PLACEMENT, rank=at.rank, shuffle=at.shuffle)


def on_ranks(program: Any, order: int, members: tuple[int, ...] = ()) -> list[Any]:
    capacity = Capacity(max_tokens_per_rank=8, max_bytes_per_token=16, num_topk=NUM_TOPK)
    layout = DeviceLayout(Topology((0,) * NUM_RANKS, members), capacity, Settings(slice_bytes=64))
    return World(layout, PLACEMENT, Machine(order)).run(program)


@pytest.mark.parametrize("order", range(4))
@pytest.mark.parametrize("num_tokens", [2, 8])  # fewer than the earlier dispatch had, and as many
def test_an_exact_dispatch_tells_the_errors_of_earlier_ones_as_theirs(order, num_tokens):
    """It has waited for the device, so all reports are in memory."""

    def program(at: Rank) -> list[Exception | None]:
        static = StaticRows(18 if at.rank else 17)  # 18 rows are needed
        dispatch(at, with_bad_id(99, token=5) if at.rank == 1 else ids(8), STATIC)
        first = dispatch(at, ids(num_tokens), None)
        dispatch(at, ids(8), static)
        return [first, *(dispatch(at, ids(num_tokens), None) for _ in range(2)), engine_at(at).pending_error()]

    for rank, (first, second, third, pending) in enumerate(on_ranks(program, order)):
        assert type(first) is ValueError
        assert str(first) == f"in an earlier dispatch into static rows, rank 1 passed topk_idx[5, 1] = 99 {RANGE}"
        assert (type(second), third, pending) == (type(None) if rank else RowOverflowError, None, None)
        assert rank or (second.num_rows, second.num_rows_needed) == (17, 18)


@pytest.mark.parametrize("bad_id", [99, -2, 2**31 - 1, 2**40, -(2**40)])
@pytest.mark.parametrize("is_first_wrong", [False, True])
def test_an_exact_dispatch_raises_its_own_error(bad_id, is_first_wrong):
    def program(at: Rank) -> tuple[Exception | None, Exception | None]:
        dispatch(at, with_bad_id(50, token=3) if is_first_wrong else ids(8), STATIC)
        rejection = dispatch(at, with_bad_id(bad_id, token=5) if at.rank == 1 else ids(8), None)
        return rejection, engine_at(at).pending_error()

    rejections = on_ranks(program, order=0)
    what = f"topk_idx[5, 1] = {bad_id} {RANGE}"
    assert (type(rejections[1][0]), str(rejections[1][0])) == (ValueError, what)
    earlier = f"in an earlier dispatch into static rows, rank 0 passed topk_idx[3, 1] = 50 {RANGE}"
    for rank, (rejection, pending) in enumerate(rejections):
        assert str(pending) == (earlier if is_first_wrong else "None")
        if rank != 1:
            assert str(rejection).startswith("dispatch was cancelled on all ranks, since rank 1 rejected its input: ")


def test_once_members_have_changed_ranks_are_named_by_their_numbers_in_the_group():
    def program(at: Rank) -> tuple[Exception | None, ...]:
        wrong = with_bad_id(99, token=5) if at.rank == 1 else ids(8)
        of_exact, _ = dispatch(at, wrong, None), dispatch(at, wrong, STATIC)
        of_static, _ = dispatch(at, ids(8), None), dispatch(at, ids(8), StaticRows(1))
        return of_exact, of_static, dispatch(at, ids(8), None)

    for rank, (of_exact, of_static, overflow) in enumerate(on_ranks(program, order=0, members=(0, 2, 5))):
        assert rank == 1 or "since rank 2 rejected its input" in str(of_exact)
        assert "rank 2 passed topk_idx[5, 1] = 99" in str(of_static)
        assert str(overflow).startswith(f"rank {(0, 2, 5)[rank]} needed ")


def test_the_first_of_several_static_dispatches_is_told_until_the_host_looks():
    def program(at: Rank) -> list[str]:
        engine, seen = engine_at(at), []
        for tokens in ((5, 3), (2,), ()):
            for token in tokens:
                dispatch(at, with_bad_id(99, token=token) if at.rank == 1 else ids(8), STATIC)
            at.machine_is_idle()
            seen.append(str(engine.pending_error()).partition(" passed ")[2])
        return seen

    for seen in on_ranks(program, order=1):
        assert seen == [f"topk_idx[5, 1] = 99 {RANGE}", f"topk_idx[2, 1] = 99 {RANGE}", ""]


def test_an_invalid_id_and_an_overflow_of_one_dispatch_are_both_told():
    def program(at: Rank) -> list[type]:
        dispatch(at, with_bad_id(99, token=5), StaticRows(1))
        at.machine_is_idle()
        engine = engine_at(at)
        return [type(engine.pending_error()) for _ in range(3)]

    for seen in on_ranks(program, order=2):
        assert seen == [ValueError, RowOverflowError, type(None)]
