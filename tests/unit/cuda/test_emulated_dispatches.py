"""Dispatches that no host waits for, on emulated kernels: nothing of one is taken for that of another."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from emulated_dispatches import NUM_EXPERTS, NUM_TOKENS, NUM_TOPK, Repeated, dispatch
from emulated_scenes import EPOCHS
from emulator import is_available
from simulated_nodes import Rank

from fusco import StaticRows
from fusco.control.fingerprint import CollectiveFingerprint
from fusco.cuda.memory.arena import Overflow

pytestmark = [
    pytest.mark.skipif(not is_available, reason="needs a C++ compiler, g++ or clang++"),
    pytest.mark.usefixtures("as_many_blocks_as_for_many_tokens"),
]


@pytest.mark.parametrize(("order", "tokens_of_rank_0"), [(0, NUM_TOKENS), (1, 0), (2, NUM_TOKENS), (3, 0)])
def test_routing_of_one_plan_is_not_overwritten_by_that_of_the_next(folder, order, tokens_of_rank_0):
    repeated = Repeated(folder, order)

    def on_rank(at: Rank) -> None:
        dtypes = (torch.float32, torch.float64) * 3
        num_tokens = NUM_TOKENS if at.rank else tokens_of_rank_0
        requests = [repeated.request(at.rank, number, dtype, num_tokens) for number, dtype in enumerate(dtypes)]
        sent = [dispatch(at, request) for request in requests]
        for number, (rows, plan) in enumerate(sent):
            end = int(plan.tables.block_to_end_slot[-1])
            assert torch.equal(plan.slot_weights[:end].double(), rows[:end]), f"dispatch {number} on rank {at.rank}"
            assert (rows[:end] // 1000 == number).all()

    repeated.world.run(on_rank)


def test_an_invalid_id_of_a_dispatch_that_no_host_waits_for_outlives_later_ones(folder):
    repeated = Repeated(folder, order=1)

    def on_rank(at: Rank) -> list[Any]:
        told: list[Any] = []
        for token in (3, 5, 6):
            request = repeated.request(at.rank, token, torch.float32)
            if at.rank == 1:
                request.routing.topk_idx[token, 1] = NUM_EXPERTS + token
            try:
                dispatch(at, request if token < 6 else replace(request, static=None))
            except ValueError as error:
                told.append(str(error).partition("topk_idx")[2])
        return [*told, *(at.arena.plan_report.take_invalid_pair(is_static=True) for _ in range(2))]

    told = f"[6, 1] = {NUM_EXPERTS + 6} is not an expert: ids go from 0 to {NUM_EXPERTS - 1}, and -1 means none"
    assert repeated.world.run(on_rank) == [[told, (1, 3, 1, NUM_EXPERTS + 3), None]] * 2


@pytest.mark.parametrize(("order", "rows_per_expert"), [(0, 1), (1, 30), (2, 2 * NUM_TOKENS * NUM_TOPK)])
def test_an_overflow_names_the_first_expert_with_the_most_rows(folder, order, rows_per_expert):
    repeated = Repeated(folder, order)

    def on_rank(at: Rank) -> tuple[list[int], Overflow | None, Overflow | None]:
        static = StaticRows(rows_per_expert=rows_per_expert)
        request = replace(repeated.request(at.rank, order, torch.float32), static=static)
        plan = dispatch(at, request)[1]
        at.machine_is_idle()
        wanted = plan.num_rows_per_expert + plan.num_dropped_per_expert
        return wanted.tolist(), *(at.arena.plan_report.take_overflow() for _ in range(2))

    for wanted, overflow, second in repeated.world.run(on_rank):
        most = max(wanted)
        assert overflow == ((most, rows_per_expert, wanted.index(most)) if most > rows_per_expert else None)
        assert second is None


@pytest.mark.parametrize(("order", "age"), [(0, 0), (1, 2**32 - 100), (2, 2**32 - 100)])
def test_epochs_wrap_around(folder, order, age):
    """Flags of tokens that were not used for any number of epochs, almost all of them, are not taken for new ones."""
    repeated, last = Repeated(folder, order), -3  # as an unsigned number, three epochs before it is 0 again

    def on_rank(at: Rank) -> None:
        layout, arena = repeated.layout, at.arena
        arena._state[EPOCHS] = last
        arena.memory[: layout.offsets["ids"]].view(torch.int32).fill_(last)
        old = arena.memory[layout.offsets["rows_ready"] : layout.offsets["ids"]].view(torch.int32)
        old.fill_(last - age + 2**32 if age else last)
        at.session.agree(CollectiveFingerprint("begin"))  # barrier: no rank begins before all are here
        for number in range(6):
            request = repeated.request(at.rank, number, torch.float32)
            rows, plan = dispatch(at, request)
            assert (rows[: int(plan.tables.block_to_end_slot[-1])] // 1000 == number).all()
            out = at.combine(plan, rows[:, None].clone(), is_weighted=False)
            num_terms = out[:, 0] / request.payloads[0]
            assert torch.equal(num_terms, num_terms.round())
            assert num_terms.max() <= NUM_TOPK
        assert arena._state[EPOCHS].tolist() == [last + 6] * len(EPOCHS)

    repeated.world.run(on_rank)
