"""Outputs with a fixed number of rows for each expert on a GPU: what fits, what does not, and a graph of them."""

from __future__ import annotations

import pytest
import torch
from one_rank import NUM_EXPERTS, OneRank, case_of

from comparison import assert_same_bits, world_rows
from fusco import RowOverflowError, StaticRows
from generator import KINDS, any_bits, values
from law import Law

pytestmark = pytest.mark.cuda
HIDDEN = 9


def rows_of(case) -> list[torch.Tensor]:
    """Two payloads."""
    kinds = ((torch.bfloat16, HIDDEN), (torch.float32, 2))
    return [any_bits((case.num_tokens(0), width), dtype, case.seed, "x", width) for dtype, width in kinds]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("alignment", [1, 8])
def test_rows_of_each_expert_are_apart_and_those_that_do_not_fit_are_dropped(one: OneRank, kind, alignment):
    for seed, blocks in enumerate((1, 3, 40)):
        case, rows_per_expert = case_of(kind, seed, num_topk=6), alignment * blocks
        static = StaticRows(rows_per_expert=rows_per_expert, on_overflow="drop")
        handle = one.dispatch(case, rows_of(case), alignment=alignment, static=static)
        one.comm.synchronize()  # raises nothing
        plan = one.plan(case, alignment, None, rows_per_expert)
        law = Law([case.topk_idx(0)], one.comm.placement.expert_to_rank, alignment, rows_per_expert)
        assert plan.num_dropped_per_expert.tolist() == law.num_dropped(0)
        (y,) = world_rows(law, HIDDEN, torch.bfloat16, seed)
        given = y.view(NUM_EXPERTS, rows_per_expert, HIDDEN).to(one.device)
        out = one.comm.combine(given, handle)
        expected = one.twin_of_combine(case, y, plan, case.topk_weights(0))
        assert_same_bits(out.cpu(), expected, "combine and its twin")


def test_an_overflow_names_the_expert(one: OneRank):
    case = case_of("skewed", 1, num_topk=4)
    needed = one.plan(case, 1, None, 2).num_slots_needed
    counts = one.plan(case).num_rows_per_expert.tolist()
    one.dispatch(case, rows_of(case), static=StaticRows(rows_per_expert=2))
    with pytest.raises(RowOverflowError, match=r"StaticRows\(rows_per_expert=2\)") as raised:
        one.comm.synchronize()
    error = raised.value
    assert (error.num_rows, error.num_rows_needed, error.local_expert) == (2, needed, counts.index(needed))
    one.comm.synchronize()


def test_a_graph_of_masked_rows_gives_what_exact_rows_give(one: OneRank):
    cases = [case_of("balanced", seed, num_topk=4) for seed in range(4)]
    num_tokens = cases[0].num_tokens(0)
    static = StaticRows(rows_per_expert=num_tokens * 4)
    x = torch.zeros(num_tokens, HIDDEN, dtype=torch.bfloat16, device=one.device)
    ids = torch.zeros(num_tokens, 4, dtype=torch.int64, device=one.device)

    def step(static):
        sent = one.comm.dispatch(x, ids, static=static)
        return sent, one.comm.combine(sent.rows * 2, sent.handle)

    step(static)
    torch.cuda.synchronize(one.device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sent, out = step(static)
    for case in cases:
        x.copy_(values(x.shape, torch.bfloat16, case.seed, "x"))
        ids.copy_(case.topk_idx(0))
        sent.rows.view(torch.uint8).fill_(0xFF)
        graph.replay()
        is_row = torch.arange(static.rows_per_expert, device=one.device) < sent.num_rows_per_expert[:, None]
        exact, sums = step(None)
        assert_same_bits(sent.rows[is_row].cpu(), exact.rows.cpu(), "rows")
        assert_same_bits(out.cpu(), sums.cpu(), "sums")
    one.comm.synchronize()
    del graph
