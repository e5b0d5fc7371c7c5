"""Outputs of a fixed size on a GPU: what fits, what does not, and graphs that are captured once and replayed."""

from __future__ import annotations

import pytest
import torch
from one_rank import OneRank, case_of, taken

import fusco
from comparison import assert_same_bits
from fusco import RowOverflowError, StaticRows
from generator import KINDS, any_bits, values

pytestmark = pytest.mark.cuda


def rows_of(case, hidden=9, dtype=torch.bfloat16):
    return any_bits((case.num_tokens(0), hidden), dtype, case.seed, "x")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("alignment", [1, 8])
def test_what_fits_is_there_and_nothing_is_raised(one: OneRank, kind, alignment):
    for seed, spare in enumerate((0, 1, 100)):
        case = case_of(kind, seed, num_topk=6)
        num_slots = max(1, one.plan(case, alignment).num_slots_needed + spare)
        handle = one.dispatch(case, [rows_of(case)], alignment=alignment, static=StaticRows(num_slots))
        one.comm.synchronize()
        assert handle.num_rows == num_slots


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("no experts", "no tokens")])
@pytest.mark.parametrize("alignment", [1, 8])
def test_what_does_not_fit_is_dropped(one: OneRank, kind, alignment):
    for seed in range(4):
        case = case_of(kind, seed, num_topk=6)
        needed = one.plan(case, alignment).num_slots_needed
        for num_slots in {1, max(1, needed // 3), max(1, needed - 1)}:
            static = StaticRows(num_slots, on_overflow="drop")
            handle = one.dispatch(case, [rows_of(case)], alignment=alignment, static=static)
            one.comm.synchronize()  # raises nothing
            check_sums(one, case, handle, alignment)


def check_sums(one: OneRank, case, handle: fusco.Handle, alignment: int) -> None:
    """What was dropped has no term; the smallest sums show it: of ones, without weights."""
    plan = one.plan(case, alignment, handle.num_rows)
    y = torch.ones(handle.num_rows, 3, device=one.device)
    out = one.comm.combine(y, handle, weights=None).cpu()
    assert torch.equal(out, (plan.row_to_slots >= 0).sum(1, keepdim=True).expand(-1, 3).float())


def test_an_overflow_is_raised_by_the_next_synchronisation_once(one: OneRank):
    case = case_of("balanced", 1, num_topk=4)
    needed = one.plan(case).num_slots_needed
    one.dispatch(case, [rows_of(case)], static=StaticRows(needed - 1))
    with pytest.raises(RowOverflowError, match=rf"needed {needed} .*StaticRows\({needed - 1}\)") as raised:
        one.comm.synchronize()
    assert (raised.value.num_rows, raised.value.num_rows_needed) == (needed - 1, needed)
    one.comm.synchronize()
    one.dispatch(case, [rows_of(case)])


def test_an_overflow_is_raised_by_the_next_collective(one: OneRank):
    case = case_of("balanced", 2, num_topk=4)
    needed = one.plan(case).num_slots_needed
    handle = one.dispatch(case, [rows_of(case)], static=StaticRows(needed // 2))
    torch.cuda.synchronize(one.device)
    with pytest.raises(RowOverflowError):
        one.comm.combine(torch.zeros(handle.num_rows, 2, device=one.device), handle)
    check_sums(one, case, handle, alignment=1)


def test_an_overflow_is_raised_by_closing(group, device):
    case = case_of("balanced", 3, num_topk=4)
    own = OneRank(group, device)
    own.dispatch(case, [rows_of(case)], static=StaticRows(5))
    with pytest.raises(RowOverflowError, match="StaticRows"):
        own.comm.close()
    own.comm.close()  # does nothing


HIDDEN = 24


class Captured:
    """A dispatch into static rows and a combine of twice its rows, captured once."""

    def __init__(self, one: OneRank, case, alignment: int, num_slots: int) -> None:
        self._one, self._alignment, self._num_slots = one, alignment, num_slots
        self._x = torch.zeros(case.num_tokens(0), HIDDEN, dtype=torch.bfloat16, device=one.device)
        self._ids = torch.zeros(case.num_tokens(0), case.num_topk, dtype=torch.int64, device=one.device)
        self._weights = torch.zeros(case.num_tokens(0), case.num_topk, device=one.device)
        self._fill(case)
        self._run()  # compiles and loads the kernels, which a capture may not
        torch.cuda.synchronize(one.device)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._sent, self._out = self._run()

    def _run(self):
        sent = self._one.comm.dispatch(
            self._x,
            self._ids,
            self._weights,
            expert_alignment=self._alignment,
            static=StaticRows(self._num_slots, on_overflow="drop"),
        )
        return sent, self._one.comm.combine(sent.rows * 2, sent.handle)

    def _fill(self, case) -> torch.Tensor:
        x = values((case.num_tokens(0), HIDDEN), torch.bfloat16, case.seed, "x")
        self._x.copy_(x)
        self._ids.copy_(case.topk_idx(0))
        self._weights.copy_(case.topk_weights(0))
        return x

    def replay_and_compare(self, case) -> None:
        """Give it other inputs in place, and look at everything that it writes."""
        one, sent = self._one, self._sent
        x, weights = self._fill(case), case.topk_weights(0)
        taken(sent.rows), taken(self._out)
        self._graph.replay()
        torch.cuda.synchronize(one.device)
        plan = one.plan(case, self._alignment, self._num_slots)
        one.check_plan(case, plan, sent.handle)
        assert sent.num_rows_per_expert.tolist() == plan.num_rows_per_expert.tolist()
        num_written = int(plan.block_to_end_slot[-1])
        y = sent.rows.cpu()[:num_written] * 2
        one.check_rows([sent.rows], [x], plan)
        expected = one.twin_of_combine(case, y, plan, weights)
        assert_same_bits(self._out.cpu(), expected, "combine and its twin")


@pytest.mark.parametrize("kind", ["balanced", "skewed"])
def test_a_graph_is_captured_once_and_replayed_with_other_inputs(one: OneRank, kind):
    cases = [case_of(kind, seed, num_topk=6, max_tokens=100) for seed in range(4)]
    num_slots = max(one.plan(case, alignment=8).num_slots_needed for case in cases)
    captured = Captured(one, cases[0], alignment=8, num_slots=num_slots)
    for case in (cases[1], cases[2], cases[2]):
        captured.replay_and_compare(case)
    # Between replays the communicator can be used as ever.
    one.dispatch(cases[3], [rows_of(cases[3])])
    captured.replay_and_compare(cases[3])
    one.comm.synchronize()


def test_a_replayed_graph_drops_what_does_not_fit(one: OneRank):
    cases = [case_of("balanced", seed, num_topk=6, max_tokens=50) for seed in range(2)]
    captured = Captured(one, cases[0], alignment=4, num_slots=one.plan(cases[0], alignment=4).num_slots_needed // 2)
    captured.replay_and_compare(cases[1])
