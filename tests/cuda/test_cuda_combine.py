"""``combine_rows`` on a GPU against its twin and the law."""

from __future__ import annotations

import pytest
import torch
from one_rank import MAX_TOKENS, OneRank, case_of

import fusco
from fusco.core.rows import ROW_DTYPES
from generator import KINDS

pytestmark = pytest.mark.cuda


def handle_of(one, case, weights_dtype=torch.float32, alignment=1):
    """Of a dispatch of next to nothing."""
    weights = None if weights_dtype is None else case.topk_weights(0, weights_dtype).to(one.device)
    x = torch.zeros(case.num_tokens(0), 1, device=one.device)
    return one.comm.dispatch(x, case.topk_idx(0).to(one.device), weights, expert_alignment=alignment).handle


def test_sums_by_hand(one: OneRank):
    ids = torch.tensor([[1, 0], [1, -1], [-1, -1]], device=one.device)
    weights = torch.tensor([[2.0, 3.0], [0.5, 9.0], [9.0, 9.0]], device=one.device)
    sent = one.comm.dispatch(torch.tensor([[1.0], [10.0], [100.0]], device=one.device), ids, weights)
    assert sent.rows.tolist() == [[1.0], [1.0], [10.0]]
    y = torch.tensor([[1.0, -1.0], [10.0, -10.0], [100.0, -100.0]], device=one.device)
    assert one.comm.combine(y, sent.handle).tolist() == [[23.0, -23.0], [50.0, -50.0], [0.0, 0.0]]
    assert one.comm.combine(y, sent.handle, weights=None).tolist() == [[11.0, -11.0], [100.0, -100.0], [0.0, 0.0]]


@pytest.mark.parametrize("dtype", ROW_DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_routing(one: OneRank, kind, dtype):
    for seed, num_topk in enumerate((1, 6, 32)):
        case = case_of(kind, seed, num_topk)
        handle = handle_of(one, case, (torch.float32, None, torch.float64)[seed], alignment=1 + seed)
        for hidden in (1, 8, 33):
            one.combine(case, handle, hidden, dtype, alignment=1 + seed)


@pytest.mark.parametrize("dtype", ROW_DTYPES, ids=str)
@pytest.mark.parametrize("hidden", [1, 2, 3, 4, 5, 7, 16, 17, 34, 64, 255, 256, 257, 1000, 1001, 1024])
def test_odd_widths(one: OneRank, hidden, dtype):
    case = case_of("ragged with holes", 3, num_topk=4)
    handle = handle_of(one, case, alignment=3)
    one.combine(case, handle, hidden, dtype, alignment=3)
    one.combine(case, handle, hidden, dtype, alignment=3, is_weighted=False)


@pytest.mark.parametrize("kind", ["balanced", "skewed", "one expert takes all", "ragged with holes"])
def test_many_tokens(one: OneRank, kind):
    case = case_of(kind, 5, num_topk=8, max_tokens=MAX_TOKENS)
    one.combine(case, handle_of(one, case), 96, torch.bfloat16)


@pytest.mark.parametrize("launch", [fusco.Launch(num_sms=1), fusco.Launch(num_sms=9), fusco.Launch(own_stream=True)])
def test_on_few_multiprocessors_and_on_a_stream_of_its_own(one: OneRank, launch):
    for seed in range(3):
        case = case_of("ragged", seed, num_topk=8, max_tokens=300)
        one.combine(case, handle_of(one, case), 200, torch.bfloat16, launch=launch)


def test_the_same_sums_bit_for_bit_every_time(one: OneRank):
    case = case_of("skewed", 2, num_topk=8, max_tokens=300)
    handle = handle_of(one, case)
    y = torch.randn(handle.num_rows, 72, device=one.device).bfloat16()
    first = one.comm.combine(y, handle)
    for num_sms in (None, 3, 20, 100):
        assert torch.equal(one.comm.combine(y, handle, launch=fusco.Launch(num_sms=num_sms)), first)


def test_what_stands_in_padding_is_not_looked_at(one: OneRank):
    # Rows after the last block of a static output are undefined, too.
    case = case_of("ragged", 4, num_topk=3)
    plan = one.plan(case, alignment=8)
    num_slots = plan.num_slots_needed + 13
    x = torch.zeros(case.num_tokens(0), 1, device=one.device)
    sent = one.comm.dispatch(x, case.topk_idx(0).to(one.device), expert_alignment=8, static=fusco.StaticRows(num_slots))
    y = torch.full((num_slots, 5), float("nan"), device=one.device)
    slots = plan.row_to_slots[plan.row_to_slots >= 0].long()
    y[slots.to(one.device)] = 1.0
    out = one.comm.combine(y, sent.handle).cpu()
    assert torch.equal(out, (plan.row_to_slots >= 0).sum(1, keepdim=True).expand(-1, 5).float())
    one.comm.synchronize()
