"""What was launched before a rank was lost is launched again among those that are left, on emulated kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from emulated_dispatches import NUM_EXPERTS, NUM_TOKENS, NUM_TOPK, Repeated
from emulator import is_available
from simulated_nodes import Rank

from comparison import assert_same_bits
from fusco.control.fingerprint import CollectiveFingerprint
from fusco.core.profile import Call, CallProfile
from fusco.cuda.kernels.share_counts import share_counts
from generator import random_of
from law import Law

pytestmark = [
    pytest.mark.skipif(not is_available, reason="needs a C++ compiler, g++ or clang++"),
    pytest.mark.usefixtures("as_many_blocks_as_for_many_tokens"),
]
NUM_RANKS, NUM_PLAYS = 3, 3


class Replays:
    """A dispatch, another along its plan, and a combine, launched again without hosts that agree, as in a graph."""

    def __init__(self, at: Rank, repeated: Repeated) -> None:
        self._at, request = at, repeated.request(at.rank, 1, torch.float64)
        self._ids, self._weights, self._x = request.routing.topk_idx, request.routing.topk_weights, request.payloads[0]
        pending = at.shuffle.prepare_dispatch(request, Call(1, CallProfile()), at.stream)
        counts = at.session.agree(CollectiveFingerprint("dispatch", request.fields), pending.counts)
        self._dispatch = lambda: pending.run(counts)

    def fill(self, play: int) -> None:
        for there, values in zip((self._ids, self._weights, self._x), inputs(self._at.rank, play), strict=True):
            there.copy_(values)

    def replay(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return rows, rows of each expert, and sums."""
        sent = self._dispatch()
        sums = self._at.combine(sent.plan, sent.rows[0][:, None] * 2, is_weighted=True)
        return sent.rows[0], sent.plan.num_rows_per_expert, sums


def inputs(rank: int, play: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    random = random_of("absent", rank, play)
    ids = torch.randint(-1, NUM_EXPERTS, (NUM_TOKENS, NUM_TOPK), generator=random)
    weights, x = (torch.randint(-9, 9, shape, generator=random).double() for shape in (ids.shape, (NUM_TOKENS,)))
    return ids, weights, x


def barrier(at: Rank) -> None:
    at.machine_is_idle()
    at.session.agree(CollectiveFingerprint("barrier"))


def miss_all(replays: Replays) -> None:
    """Launch nothing."""


def miss_the_combine(replays: Replays) -> None:
    replays._dispatch()


@pytest.mark.parametrize(("missed", "victim", "order"), [(miss_all, 0, 0), (miss_the_combine, 2, 1)])
def test_ranks_that_are_left_get_what_a_new_communicator_would_give_them(
    missed: Callable[[Replays], Any], victim: int, order: int, folder
):
    repeated = Repeated(folder, order, num_ranks=NUM_RANKS, timeout_s=0.3, patience=1000)

    def on_rank(at: Rank) -> Any:
        replays, results = Replays(at, repeated), []
        replays.replay()
        barrier(at)
        if at.rank == victim:
            missed(replays)
        else:
            replays.replay()
        at.arena.abort()
        barrier(at)
        if at.rank != victim:
            assert missed is miss_all or at.arena.has_failed
            at.arena.begin_again(1 << victim)
        barrier(at)
        for play in range(NUM_PLAYS):
            replays.fill(play)
            results.append([each.clone() for each in replays.replay()])  # the victim, which knows nothing, writes, too
        barrier(at)
        return results, at.arena

    played = repeated.world.run(on_rank)
    left = [rank for rank in range(NUM_RANKS) if rank != victim]
    for play in range(NUM_PLAYS):
        ids, weights, x = zip(*(inputs(rank, play) for rank in range(NUM_RANKS)), strict=True)
        lost = torch.tensor([*(owner == victim for owner in repeated.placement.expert_to_rank), True])
        known = [each.masked_fill(lost[each], -1) if rank != victim else each[:0] for rank, each in enumerate(ids)]
        law = Law(known, repeated.placement.expert_to_rank)
        y = [law.rows(rank, x)[:, None] * 2 for rank in range(NUM_RANKS)]
        for rank in left:
            rows, counts, sums = played[rank][0][play]
            assert counts.tolist() == law.counts(rank)
            assert_same_bits(rows[: sum(law.counts(rank))], law.rows(rank, x), "rows")
            assert torch.equal(sums, law.sums(rank, y, weights, [0] * NUM_RANKS).exact)  # of integers
    assert not any(played[rank][1].has_failed for rank in left)


def test_nothing_is_written_to_a_rank_that_is_absent_and_its_counts_are_zero(folder):
    victim, repeated = 1, Repeated(folder, 1, num_ranks=NUM_RANKS, timeout_s=0.3, patience=1000)

    def on_rank(at: Rank) -> Any:
        replays = Replays(at, repeated)
        counts = torch.full((NUM_RANKS, NUM_EXPERTS), 7, dtype=torch.int32)
        barrier(at)
        if at.rank != victim:
            at.arena.begin_again(1 << victim)
        barrier(at)
        before = at.arena.memory.clone()
        barrier(at)
        if at.rank != victim:
            replays.fill(0)
            replays.replay()
            offset = repeated.layout.offsets["end"]
            share_counts(at.context.launcher(at.stream), replays._ids, counts, offset, range(NUM_RANKS))
        barrier(at)
        return torch.equal(at.arena.memory, before), counts.tolist()

    played = repeated.world.run(on_rank)
    assert [is_same for is_same, _ in played] == [rank == victim for rank in range(NUM_RANKS)]
    expected = [
        torch.bincount(inputs(rank, 0)[0].view(-1) + 1, minlength=NUM_EXPERTS + 1)[1:] for rank in range(NUM_RANKS)
    ]
    expected[victim].zero_()
    for rank in (0, 2):
        assert played[rank][1] == [each.tolist() for each in expected]
