"""Ranks of ``deep_ep`` that call the same thing, or different ones: what is out of step raises on all at once."""

from __future__ import annotations

import time
from collections.abc import Callable
from random import Random

import torch
import torch.distributed as dist

from comparison import assert_same_bits
from fusco.core.errors import MismatchError, RejectedInputError
from fusco.integrations.deep_ep.buffer import Buffer

_NUM_STEPS, _HIDDEN, _NUM_LOCAL, _NUM_TOPK = 25, 24, 3, 2
_SOON_S = 10.0  # far below the limit of a wait, even on a loaded machine


class _Rank:
    """A rank's buffer and the handle of its latest dispatch in step; tokens are the same on all ranks."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._buffer, self._num_ranks = Buffer(group), group.size()
        self._x = self._sums = torch.empty(0)
        self._handle: tuple[object, ...] = ()
        self.dispatch(4)

    def dispatch(self, num_tokens: int) -> None:
        """Dispatch so many tokens, for which the communicator may have to grow."""
        experts = torch.arange(num_tokens * _NUM_TOPK).view(num_tokens, _NUM_TOPK) % (self._num_ranks * _NUM_LOCAL)
        _, _, of_experts, is_in, _ = self._buffer.get_dispatch_layout(experts, self._num_ranks * _NUM_LOCAL)
        x = torch.arange(1.0, num_tokens + 1)[:, None].expand(-1, _HIDDEN)
        rows, *_, handle, _ = self._buffer.dispatch(
            x, is_token_in_rank=is_in, num_tokens_per_expert=of_experts, topk_idx=experts
        )
        self._x, self._handle, self._sums = x, handle, x * is_in.sum(1, keepdim=True)
        self._rows = rows

    def again(self) -> None:
        """Dispatch along the handle: the same rows again."""
        assert_same_bits(self._buffer.dispatch(self._x, self._handle)[0], self._rows, "rows again")

    def combine(self) -> None:
        """Combine what was dispatched: each token once for each of its ranks."""
        assert_same_bits(self._buffer.combine(self._rows, self._handle)[0], self._sums, "sums")

    def reject(self) -> None:
        """Dispatch ids that are no experts."""
        bad = torch.full((1, _NUM_TOPK), 99)
        is_in = torch.ones(1, self._num_ranks, dtype=torch.bool)
        of_experts = torch.ones(self._num_ranks * _NUM_LOCAL, dtype=torch.int32)
        self._buffer.dispatch(self._x[:1], is_token_in_rank=is_in, num_tokens_per_expert=of_experts, topk_idx=bad)

    def destroy(self) -> None:
        """Free the buffer."""
        self._buffer.destroy()


def out_of_step(group: dist.ProcessGroup, name: str) -> int:
    """Call at random; all ranks draw the same calls, so each knows what the others do. Return how many raised."""
    random, rank, num_raised = Random(name), _Rank(group), 0
    for step in range(_NUM_STEPS):
        size = random.choice((4, 5, 300))
        calls: dict[str, Callable[[], None]] = {
            "dispatch": lambda size=size: rank.dispatch(size),
            "dispatch_again": rank.again,
            "combine": rank.combine,
            "reject": rank.reject,
        }
        usual = random.choice(("dispatch", "dispatch_again", "combine"))
        chosen = [usual] * group.size()
        if random.random() < 0.5:
            for other in random.sample(range(group.size()), random.randint(1, group.size())):
                chosen[other] = random.choice(sorted(calls))
        begin, what = time.monotonic(), f"step {step} of {name}, calls {chosen}, {size} tokens"
        try:
            calls[chosen[group.rank()]]()
            raised: Exception | None = None
        except (MismatchError, RejectedInputError, ValueError) as error:
            raised = error
        seconds = time.monotonic() - begin
        assert seconds < _SOON_S, f"{what}: rank {group.rank()} took {seconds:.1f} s"
        is_in_step = len(set(chosen)) == 1 and chosen[0] != "reject"
        assert (raised is None) == is_in_step, f"{what}: rank {group.rank()} raised {raised!r}"
        num_raised += raised is not None
        if raised is not None:
            rank.dispatch(size)  # in step: it must work
            rank.combine()
    rank.destroy()
    return num_raised
