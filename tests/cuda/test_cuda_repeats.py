"""Repeated calls on a GPU, compared with the twins as first calls are."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from one_rank import OneRank, case_of

import fusco
from fusco.cuda.repeated_calls import RepeatedCombine, RepeatedDispatch
from generator import values

pytestmark = pytest.mark.cuda

NUM_CALLS = 7
FIRST_CALLS = 3  # validated in full; known; prepared


# The communicator is that of all tests: each case has rows of its own size, so that no case knows them from another.
@pytest.mark.parametrize(("is_static", "hidden"), [(False, 136), (True, 152)])
def test_repeated_calls_equal_their_twins(one: OneRank, is_static: bool, hidden: int):
    case = case_of("ragged with holes", 3, num_topk=6, max_tokens=200)
    static = fusco.StaticRows(one.plan(case).num_slots_needed + 5) if is_static else None
    with (
        mock.patch.object(RepeatedDispatch, "run", autospec=True, side_effect=RepeatedDispatch.run) as dispatches,
        mock.patch.object(RepeatedCombine, "run", autospec=True, side_effect=RepeatedCombine.run) as combines,
    ):
        for seed in range(NUM_CALLS):
            rows = values((case.num_tokens(0), hidden), torch.bfloat16, seed, "x")
            handle = one.dispatch(case, [rows], static=static)
            if not is_static:
                one.combine(case, handle, hidden, torch.bfloat16)
    assert dispatches.call_count == NUM_CALLS - FIRST_CALLS
    assert combines.call_count == (0 if is_static else NUM_CALLS - FIRST_CALLS)
