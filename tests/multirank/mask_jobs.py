"""Functions on ranks: low-latency calls of DeepEP's first version that go on without ranks, and take them in again."""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from integration_cases import HIDDEN, NUM_LOCAL, cases
from low_latency_jobs import check_handle

import fusco
from comparison import assert_same_bits, assert_within
from fusco.integrations.deep_ep.buffer import Buffer
from fusco.integrations.deep_ep.low_latency import LowLatencyHandle
from generator import Case, values
from law import Law

LIMIT_S, REJOIN_LIMIT_S = 4.0, 30.0


class Serving:
    """A buffer of one rank and what its calls must give, while ranks are masked."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        with mock.patch("fusco.integrations.group_communicators.Settings", partial(fusco.Settings, timeout_s=LIMIT_S)):
            self.buffer = Buffer(group, low_latency_mode=True, enable_shrink=True)
        self.rank, self.size = group.rank(), group.size()

    def dispatch(self, case: Case, masked: tuple[int, ...] = ()) -> LowLatencyHandle:
        """Dispatch, and compare with the specification."""
        x = [values((case.num_tokens(rank), HIDDEN), torch.bfloat16, case.seed, "x", rank) for rank in range(self.size)]
        rows, counts, handle, _, _ = self.buffer.low_latency_dispatch(
            x[self.rank], case.topk_idx(self.rank), case.max_tokens, case.num_experts, use_fp8=False
        )
        self.require_masked(masked)
        law = law_without(case, masked)
        expected, is_row = law.rows(self.rank, x), ~law.undefined(self.rank)
        assert counts.tolist() == law.counts(self.rank)
        assert_same_bits(rows.flatten(0, 1)[is_row], expected[is_row], "rows")
        check_handle(law, handle, self.rank)
        return handle

    def combine(
        self, case: Case, handle: LowLatencyHandle, masked: tuple[int, ...] = (), before: tuple[int, ...] = ()
    ) -> None:
        """Combine rows of a dispatch, before which ranks were masked, and compare with the specification."""
        law, rank = law_without(case, before), self.rank
        y = [values((len(law.slots(r)), HIDDEN), torch.bfloat16, case.seed, "y", r) for r in law.ranks]
        weights = case.topk_weights(rank)
        rows = y[rank].masked_fill(law.undefined(rank)[:, None], torch.nan).view(NUM_LOCAL, -1, HIDDEN)
        sums, _, _ = self.buffer.low_latency_combine(rows, case.topk_idx(rank), weights, handle)
        self.require_masked(masked)
        is_lost = torch.isin(case.topk_idx(rank) // NUM_LOCAL, torch.tensor(masked))
        of_all = [weights.masked_fill(is_lost, 0)] * self.size
        expected = law.sums(rank, y, of_all, [0] * self.size)
        assert_within(sums, expected.exact, law.error_bound(expected, torch.bfloat16, None), "sums")

    def require_masked(self, masked: tuple[int, ...]) -> None:
        """Compare what the buffer says of the ranks."""
        status = torch.full((self.size,), -1, dtype=torch.int32)
        self.buffer.low_latency_query_mask_buffer(status)
        assert tuple(status.nonzero().flatten().tolist()) == masked

    def serve(self, case: Case, masked: tuple[int, ...] = ()) -> None:
        """Dispatch, combine and clean, without new failures."""
        self.combine(case, self.dispatch(case, masked), masked, before=masked)
        self.buffer.clean_low_latency_buffer(case.max_tokens, HIDDEN, case.num_experts)

    def take_in(self) -> None:
        """Wait until all ranks are there again."""
        deadline = time.monotonic() + REJOIN_LIMIT_S
        while self.buffer._masked.masked:
            self.buffer.low_latency_clean_mask_buffer()
            assert time.monotonic() < deadline


def law_without(case: Case, masked: tuple[int, ...]) -> Law:
    """The specification with neither tokens nor experts of masked ranks."""
    ids = [
        (each[:0] if rank in masked else each).masked_fill(
            torch.isin((each[:0] if rank in masked else each) // NUM_LOCAL, torch.tensor(masked, dtype=torch.int64)), -1
        )
        for rank, each in enumerate(case.world_topk_idx)
    ]
    owners = [expert // NUM_LOCAL for expert in range(case.num_experts)]
    return Law(ids, owners, rows_per_expert=case.max_tokens * case.world_size)


def lose_ranks(group: dist.ProcessGroup, how: str) -> bool:
    """Ranks 1 and 3 fail before a dispatch, a combine or a barrier of the others."""
    serving, (first, second, *_) = Serving(group), cases(group.size())
    if how == "at the first dispatch":
        if serving.rank == 1:
            _fail(serving)
            return False
        serving.serve(first, (1,))
    else:
        handle = serving.dispatch(first)
        if serving.rank == 1:
            _fail(serving)
            return False
        for _ in range(2):
            serving.combine(first, handle, (1,))
    serving.serve(second, (1,))
    if serving.rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    serving.buffer.clean_low_latency_buffer(second.max_tokens, HIDDEN, second.num_experts)
    serving.require_masked((1, 3))
    serving.serve(first, (1, 3))
    serving.buffer.destroy()
    return True


def _fail(serving: Serving) -> None:
    serving.buffer.destroy()


def lose_a_late_rank_for_a_while(group: dist.ProcessGroup) -> bool:
    """Rank 2 is late in a combine: the others go on, it learns that, and comes back."""
    serving, (case, other, *_) = Serving(group), cases(group.size())
    handle = serving.dispatch(case)
    if serving.rank == 2:
        time.sleep(2 * LIMIT_S)
        with pytest.raises(fusco.ExcludedError):
            serving.combine(case, handle)
        serving.buffer.low_latency_update_mask_buffer(2, False)
    else:
        serving.combine(case, handle, (2,))
        serving.serve(case, (2,))
        serving.take_in()
    serving.serve(other)
    serving.buffer.destroy()
    return True


def mask_on_purpose(group: dist.ProcessGroup) -> bool:
    """All ranks mask rank 0, which comes back."""
    serving, (case, other, *_) = Serving(group), cases(group.size())
    serving.serve(case)
    serving.buffer.low_latency_update_mask_buffer(0, True)
    serving.buffer.low_latency_update_mask_buffer(0, True)  # changes nothing
    if serving.rank == 0:
        with pytest.raises(fusco.ClosedError):
            serving.dispatch(case)
        serving.buffer.low_latency_update_mask_buffer(0, False)
    else:
        serving.buffer.low_latency_update_mask_buffer(1, False)
        serving.serve(other, (0,))
        serving.take_in()
    serving.serve(case)
    serving.buffer.destroy()
    return True
