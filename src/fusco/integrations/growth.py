"""Communicators that grow: when a dispatch does not fit on one rank, all ranks make a larger communicator for it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import reduce
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from fusco.api.communicator import Communicator
from fusco.api.membership import Rejecting
from fusco.control.fingerprint import GROWTH, REJECTION, CollectiveFingerprint, check_fingerprints
from fusco.control.store_gather import StoreGather
from fusco.core.config import Capacity, Settings
from fusco.core.errors import ClosedError, GrowthError
from fusco.core.rows import row_bytes

_Result = TypeVar("_Result")


_LEAST = Capacity(num_topk=1, max_tokens_per_rank=1, max_bytes_per_token=1)


@dataclass(frozen=True, eq=False)
class Grown:
    """One of several communicators."""

    comm: Communicator
    capacity: Capacity
    number: int  # the same on all ranks


class GrowingCommunicators:
    """The communicators of a group that are large enough for every call so far; in turn, and on all ranks the same.

    Frameworks tell no maximum number of tokens. A rank whose dispatch does not fit asks for a larger communicator in
    the place of the dispatch. All ranks learn so before anything is sent, exchange what they need and make it. Handles
    of the earlier one stay valid, so it stays, too: sizes double, and all of them together take at most twice the last
    one's memory.

    A call may use another communicator than the one before: along an earlier handle, or with another number of experts.
    All ranks then agree on it in that of the call before. So ranks that are out of step never wait for each other in
    two communicators: all raise ``MismatchError``, and their next call is in step.
    """

    def __init__(
        self, group: dist.ProcessGroup, *, ranks_per_node: int | None = None, settings: Settings | None = None
    ) -> None:
        """Nothing is allocated before the first call. The device is that of each dispatch's tensors."""
        # Weak, so that one may live as long as its group.
        self._group = weakref.ref(group)
        self._ranks_per_node, self._settings = ranks_per_node, settings or Settings()
        self._communicators: list[Communicator] = []
        self._latest: dict[int, Grown] = {}  # by number of experts
        self._current: Grown | None = None  # of the latest call
        self._purpose = ("", 0)  # of the latest dispatch
        self._finalizer = weakref.finalize(self, _leave, self._communicators)

    def run(
        self,
        purpose: tuple[str, int],
        num_experts: int,
        need: Capacity,
        device: torch.device,
        dispatch: Callable[[Grown], _Result],
    ) -> _Result:
        """Return ``dispatch`` of a communicator for so many experts that is large enough; a collective.

        ``dispatch`` calls ``Communicator.dispatch`` and no other collective. ``purpose`` is what all ranks must agree
        on: a name of the call, and the number of experts that it is for. Raises what ``dispatch`` raises.
        """
        if self.is_closed:
            raise ClosedError("these communicators have been aborted")
        grown = self._latest.get(num_experts)
        if self._current is not None and (grown is not self._current or purpose != self._purpose):
            before = "" if purpose == self._purpose else f" after {_operation(self._purpose)}"
            self._agree(_operation(purpose) + before)
        if grown is not None:
            self._current, self._purpose = grown, purpose
            with suppress(GrowthError):
                if grown.capacity.holds(need):
                    return dispatch(grown)
                grown.comm.agree(GROWTH)
        return dispatch(self._make(purpose, num_experts, need, device))

    def need_of(self, payloads: Sequence[torch.Tensor], num_topk: int, max_tokens: int = 1) -> Capacity:
        """Return what a dispatch of payloads (num_tokens, ...) needs, and the combine along its handle.

        Results of FP8 rows come back in 16 bits, and along a handle float32 weights are sent with rows.
        """
        first, num_bytes = payloads[0], sum(map(row_bytes, payloads))
        if first.ndim < 2:
            raise ValueError(f"rows must be (num_tokens, hidden), got shape {tuple(first.shape)}")
        sum_bytes = 2 if self._settings.sum_dtype is None else 4  # of an element of partial sums
        return Capacity(
            num_topk=num_topk,
            max_tokens_per_rank=max(len(first), max_tokens),
            max_bytes_per_token=max(num_bytes, first.shape[1:].numel() * sum_bytes) + 4 * num_topk,
        )

    def turn_to(self, grown: Grown, verb: str) -> Communicator:
        """Return the communicator of a handle for a call along it; a collective if the call before was in another."""
        if grown is not self._current:
            self._agree(f"{verb} along a handle of communicator {grown.number}")
            self._current = grown
        return grown.comm

    @property
    def current(self) -> Grown | None:
        """The communicator of the latest call; the same on all ranks."""
        return self._current

    def rejecting(self) -> Rejecting:
        """Make an error inside a rejection of the call that all other ranks make: they raise at once, too."""
        if self._current is not None:
            return self._current.comm.rejecting()
        return Rejecting(lambda reason: self._gather(REJECTION, _LEAST, reason))

    @property
    def is_closed(self) -> bool:
        """True after ``abort``."""
        return not self._finalizer.alive

    def abort(self) -> None:
        """Release all communicators without waiting for other ranks."""
        self._finalizer()

    def _agree(self, operation: str) -> None:
        """Agree on a call in the communicator of the call before, unless a failure has ended that one."""
        if self._current is not None and not self._current.comm.is_broken:
            self._current.comm.agree(operation)

    def _make(self, purpose: tuple[str, int], num_experts: int, need: Capacity, device: torch.device) -> Grown:
        """Make a communicator that is large enough for all ranks; a collective."""
        needs = self._gather(_operation(purpose), need)
        if earlier := self._latest.get(num_experts):
            needs.append(earlier.capacity)
        grown = self._grow(num_experts, reduce(Capacity.union, needs).with_reserve(), device)
        # Only now: the next call tries again if there is no room for it.
        self._latest[num_experts], self._current, self._purpose = grown, grown, purpose
        return grown

    def _grow(self, num_experts: int, capacity: Capacity, device: torch.device) -> Grown:
        """Make a communicator; a collective."""
        comm = Communicator(
            self._group(),
            num_experts=num_experts,
            **asdict(capacity),
            ranks_per_node=self._ranks_per_node,
            settings=self._settings,
            device=device,
        )
        comm.take_turns()  # engines run each of two micro-batches in a thread of its own
        self._communicators.append(comm)
        return Grown(comm, capacity, len(self._communicators) - 1)

    def _gather(self, operation: str, need: Capacity, rejection: str = "") -> list[Capacity]:
        """Return what all ranks need; raise as a collective does if they do not agree."""
        group = self._group()
        if group is None or self.is_closed:
            raise ClosedError("these communicators have been aborted, or their process group is destroyed")
        gather = StoreGather(group, self._settings.timeout_s)
        entries = gather.all_gather("what the call needs", [operation, rejection, asdict(need)])
        fingerprints = [CollectiveFingerprint(operation, rejection=reason) for operation, reason, _ in entries]
        check_fingerprints(fingerprints, gather.rank)
        return [Capacity(**values) for *_, values in entries]


def _operation(purpose: tuple[str, int]) -> str:
    verb, num_experts = purpose
    return f"{verb} to {num_experts} experts"


def _leave(communicators: list[Any]) -> None:
    while communicators:
        communicators.pop().abort()
