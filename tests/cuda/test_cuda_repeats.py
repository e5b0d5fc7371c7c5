"""Repeated calls on a GPU, compared with the twins as first calls are."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from one_rank import OneRank, case_of, taken

import fusco
from comparison import assert_same_bits
from generator import values
from repeats import noted_repeats

pytestmark = pytest.mark.cuda

NUM_CALLS = 7
FIRST_CALLS = 2  # validated in full; known, and kept


@pytest.fixture
def repeated() -> Iterator[list[str]]:
    """Names of the calls that were repeated."""
    with noted_repeats() as operations:
        yield operations


# The communicator is that of all tests: each case has rows of its own size, so that no case knows them from another.
@pytest.mark.parametrize(("is_static", "hidden"), [(False, 136), (True, 152)])
def test_repeated_calls_equal_their_twins(one: OneRank, is_static: bool, hidden: int, repeated: list[str]):
    case = case_of("ragged with holes", 3, num_topk=6, max_tokens=200)
    static = fusco.StaticRows(one.plan(case).num_slots_needed + 5) if is_static else None
    for seed in range(NUM_CALLS):
        rows = values((case.num_tokens(0), hidden), torch.bfloat16, seed, "x")
        handle = one.dispatch(case, [rows], static=static)
        if not is_static:
            one.combine(case, handle, hidden, torch.bfloat16)
    assert repeated.count("dispatch") == NUM_CALLS - FIRST_CALLS
    assert repeated.count("combine") == (0 if is_static else NUM_CALLS - FIRST_CALLS)


def test_repeated_calls_along_handles_equal_their_twins(one: OneRank, repeated: list[str]):
    """Two handles of the same size in turn: what is repeated along one must not use the plan of the other."""
    kinds = (168, torch.bfloat16), (3, torch.float32)
    cases = [case_of("balanced", seed, num_topk=6, max_tokens=200) for seed in (5, 6)]
    x = [values((case.num_tokens(0), 168), torch.bfloat16, 0, "x") for case in cases]
    handles = [one.dispatch(case, [rows]) for case, rows in zip(cases, x, strict=True)]
    plans = [one.plan(case) for case in cases]
    for seed in range(1, 2 * NUM_CALLS):
        case, handle, plan = (of[seed % 2] for of in (cases, handles, plans))
        payloads = [values((case.num_tokens(0), width), dtype, seed, "x") for width, dtype in kinds]
        again = one.comm.dispatch_again([payload.to(one.device) for payload in payloads], handle)
        one.check_rows(again, payloads, plan)
        ys = [values((handle.num_rows, width), dtype, seed, "y") for width, dtype in kinds]
        sums = one.comm.combine_all([y.to(one.device) for y in ys], handle)
        one.comm.wait()
        for y, out in zip(ys, sums, strict=True):
            assert_same_bits(taken(out), one.twin_of_combine(case, y, plan, None), f"sums of {y.dtype}")
    assert repeated.count("dispatch_again") > FIRST_CALLS
    assert repeated.count("combine_all") > FIRST_CALLS
