"""``plan`` and ``scatter_rows`` on a GPU against their twins, bit for bit."""

from __future__ import annotations

import pytest
import torch
from one_rank import MAX_BYTES_PER_TOKEN, MAX_TOKENS, NUM_EXPERTS, OneRank, case_of, taken

import fusco
from comparison import assert_same_bits
from fusco.cuda import tuning
from generator import KINDS, any_bits
from reference.scatter_rows import scatter_rows

pytestmark = pytest.mark.cuda

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int16,
    torch.float8_e4m3fn,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
]


def rows_of(case, shape, dtype, *what):
    return any_bits((case.num_tokens(0), *shape), dtype, case.seed, "x", *what)


def test_slots_by_hand(one: OneRank):
    ids = torch.tensor([[1, 0], [1, -1], [-1, -1]], device=one.device)
    x = torch.tensor([[7.0, 8.0], [5.0, 6.0], [3.0, 4.0]], device=one.device)
    sent = one.comm.dispatch(x, ids, expert_alignment=2)
    assert sent.rows.tolist() == [[7.0, 8.0], [0.0, 0.0], [7.0, 8.0], [5.0, 6.0]]
    assert sent.num_rows_per_expert.tolist() == [1, 2, *[0] * (NUM_EXPERTS - 2)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("alignment", [1, 5, 16])
def test_every_kind_of_routing(one: OneRank, kind, alignment):
    for seed in range(6):
        case = case_of(kind, seed, num_topk=(1, 2, 6, 8, 31, 32)[seed])
        dtype = DTYPES[(seed + alignment) % len(DTYPES)]
        one.dispatch(
            case,
            [rows_of(case, ((1,), (3,), (8,), (5,), (64,), (17,))[seed], dtype)],
            alignment=alignment,
            ids_dtype=(torch.int32, torch.int64)[seed % 2],
            weights_dtype=(None, torch.float32, torch.float64)[seed % 3],
        )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_in_odd_widths(one: OneRank, dtype):
    case = case_of("ragged with holes", 3, num_topk=4)
    for shape in [(), (1,), (2,), (3,), (5,), (16,), (17,), (64,), (1001,), (2, 3), (1, 1, 1)]:
        one.dispatch(case, [rows_of(case, shape, dtype, *shape)], alignment=3)


@pytest.mark.parametrize("row_bytes", [1, 2, 12, 511, 512, 513, 4095, 4096, 4097, MAX_BYTES_PER_TOKEN])
def test_rows_of_many_vectors(one: OneRank, row_bytes):
    case = case_of("balanced", 1, num_topk=3)
    one.dispatch(case, [rows_of(case, (row_bytes,), torch.uint8)])


@pytest.mark.parametrize("kind", ["balanced", "skewed", "one expert takes all", "ragged with holes"])
def test_many_tokens(one: OneRank, kind):
    # Many blocks plan, and each warp has several rows to move.
    case = case_of(kind, 5, num_topk=8, max_tokens=MAX_TOKENS)
    one.dispatch(case, [rows_of(case, (96,), torch.bfloat16)], alignment=8)


@pytest.mark.parametrize("width", [1016, 1017])  # a launch is prepared once for a width
def test_an_output_that_caches_cannot_keep(one: OneRank, width, monkeypatch):
    monkeypatch.setattr(tuning, "STREAMED_BYTES", 0)
    case = case_of("ragged with holes", 6, num_topk=8, max_tokens=MAX_TOKENS)
    one.dispatch(case, [rows_of(case, (width,), torch.bfloat16)], alignment=8)


def test_as_many_tokens_as_a_chunk_or_one_more_or_less(one: OneRank):
    for num_tokens in (1, 15, 16, 17, 31, 32, 33, MAX_TOKENS - 1, MAX_TOKENS):
        case = case_of("balanced", num_tokens, num_topk=2, max_tokens=num_tokens)
        one.dispatch(case, [rows_of(case, (6,), torch.uint8)])


def test_several_payloads(one: OneRank):
    for seed in range(3):
        case = case_of("ragged", seed, num_topk=4)
        payloads = [
            rows_of(case, (33,), torch.float8_e4m3fn, "values"),
            rows_of(case, (2, 3), torch.float32, "scales"),
            rows_of(case, (), torch.bool, "mask"),
        ]
        handle = one.dispatch(case, payloads, alignment=4)
        again = one.comm.dispatch_again([payload.to(one.device) for payload in payloads[1:]], handle)
        one.check_rows(again, payloads[1:], one.plan(case, alignment=4))


def test_as_many_payloads_as_there_may_be(one: OneRank):
    case = case_of("ragged with holes", 4, num_topk=5)
    one.dispatch(case, [rows_of(case, (size,), torch.uint8, size) for size in (1, 2, 3, 4, 8, 16, 17, 1024)])


def test_rows_that_are_not_contiguous_or_not_aligned(one: OneRank):
    case = case_of("balanced", 2, num_topk=2)
    x = rows_of(case, (7,), torch.float16)
    plan = one.plan(case)
    wide = torch.nn.functional.pad(x, (1, 3)).to(one.device)
    shifted = torch.cat([x.new_zeros(1), x.view(-1)]).to(one.device)[1:].view(x.shape)
    for there in (wide[:, 1:-3], x.T.contiguous().to(one.device).T, shifted):
        sent = one.comm.dispatch(there, case.topk_idx(0).to(one.device))
        one.check_rows([sent.rows], [x], plan)


def test_weights_of_rows(one: OneRank):
    for seed, dtype in enumerate([torch.float16, torch.bfloat16, torch.float32, torch.float64]):
        case = case_of("ragged with holes", seed, num_topk=6)
        x = rows_of(case, (2,), torch.float32).to(one.device)
        weights = case.topk_weights(0, dtype)
        sent = one.comm.dispatch(
            x, case.topk_idx(0).to(one.device), weights.to(one.device), expert_alignment=5, with_weights=True
        )
        plan = one.plan(case, alignment=5)
        expected = scatter_rows(weights.view(-1), plan.row_to_slots.view(-1, 1), plan.num_slots_needed)
        assert sent.weights is not None
        assert_same_bits(sent.weights.cpu(), expected, f"weights of {dtype}")
        taken(sent.rows)


@pytest.mark.parametrize("launch", [fusco.Launch(num_sms=2), fusco.Launch(num_sms=7), fusco.Launch(own_stream=True)])
def test_on_few_multiprocessors_and_on_a_stream_of_its_own(one: OneRank, launch):
    for seed in range(3):
        case = case_of("ragged with holes", seed, num_topk=8, max_tokens=500)
        one.dispatch(case, [rows_of(case, (40,), torch.bfloat16)], alignment=4, launch=launch)


@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("bad_id", [NUM_EXPERTS, -2, 2**31 - 1, -(2**31)])
def test_an_id_that_is_no_expert(one: OneRank, ids_dtype, bad_id):
    check_bad_id(one, ids_dtype, bad_id)


@pytest.mark.parametrize("bad_id", [1 << 32, (1 << 32) - 1, 1 << 40, -(1 << 40), -(1 << 63)])
def test_an_id_that_is_no_expert_even_if_its_low_half_is(one: OneRank, bad_id):
    check_bad_id(one, torch.int64, bad_id)


def check_bad_id(one: OneRank, ids_dtype: torch.dtype, bad_id: int) -> None:
    """The first of two bad ids is named, and the communicator goes on."""
    case = case_of("balanced", 7, num_topk=4)
    ids = case.topk_idx(0).to(ids_dtype)
    ids[3, 1] = ids[30, 0] = bad_id
    x = rows_of(case, (4,), torch.uint8)
    with pytest.raises(ValueError, match=rf"topk_idx\[3, 1\] = {bad_id} is not an expert: ids go from 0 to 39"):
        one.comm.dispatch(x.to(one.device), ids.to(one.device))
    one.dispatch(case, [x])
