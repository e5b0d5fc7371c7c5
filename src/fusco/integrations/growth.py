"""Communicators that grow: when a call does not fit on one rank, all ranks make a larger communicator and repeat it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, dataclass, fields
from functools import reduce
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from fusco.api.communicator import Communicator
from fusco.api.membership import Rejecting
from fusco.control.store_gather import StoreGather
from fusco.core.config import Settings
from fusco.core.errors import (
    ClosedError,
    FuscoError,
    MismatchError,
    RejectedInputError,
    RowOverflowError,
    SharedMemoryError,
)
from fusco.core.rows import row_bytes

_Result = TypeVar("_Result")


@dataclass(frozen=True, kw_only=True)
class Need:
    """Capacity that a call needs, on one rank; see the arguments of ``Communicator``."""

    num_topk: int
    max_tokens_per_rank: int
    max_bytes_per_token: int

    @classmethod
    def of(cls, payloads: Sequence[torch.Tensor], num_topk: int, max_tokens: int = 1) -> Need:
        """Return what a dispatch of payloads (num_tokens, ...) needs.

        Results of FP8 rows come back in 16 bits, and along a handle float32 weights are sent with rows.
        """
        first, num_bytes = payloads[0], sum(map(row_bytes, payloads))
        return cls(
            num_topk=num_topk,
            max_tokens_per_rank=max(len(first), max_tokens),
            max_bytes_per_token=max(num_bytes, first.shape[1] * 2) + 4 * num_topk,
        )

    def union(self, other: Need) -> Need:
        """Return the larger of the two, field by field."""
        return Need(**{name: max(getattr(self, name), getattr(other, name)) for name in _FIELDS})

    def with_reserve(self) -> Need:
        """Return this need with a number of tokens at the next power of two, so that ranks rarely grow again."""
        return Need(**{**asdict(self), "max_tokens_per_rank": 1 << (self.max_tokens_per_rank - 1).bit_length()})


_FIELDS = tuple(field.name for field in fields(Need))


class _RejectedHereError(ValueError):
    """This rank has rejected a call before it began."""


class GrowingCommunicator:
    """The communicator of a group that is large enough for every call so far.

    Frameworks tell no maximum number of tokens. A rank whose call does not fit rejects it before anything is sent, so
    all ranks raise together; they exchange what they need and repeat the call on a larger communicator. Handles of the
    earlier one stay valid, so it stays, too: sizes double, and all of them together take at most twice the last one's
    memory.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        num_experts: int,
        *,
        ranks_per_node: int | None = None,
        settings: Settings | None = None,
    ) -> None:
        """Nothing is allocated before the first call. The device is that of the first call's tensors."""
        # Weak, so that one may live as long as its group.
        self._group = weakref.ref(group)
        self._num_experts, self._ranks_per_node = num_experts, ranks_per_node
        self._settings = settings or Settings()
        self._capacity: Need | None = None
        self._device = torch.device("cpu")  # of the communicators, once there is one
        self._communicators: list[Communicator] = []
        self._finalizer = weakref.finalize(self, _leave, self._communicators)

    def run(self, need: Need, device: torch.device, call: Callable[[Communicator, Need], _Result]) -> _Result:
        """Return ``call`` of a communicator that is large enough, and of its capacity; a collective.

        ``call`` runs one collective first, which rejects what does not fit. It may run twice. Raises what it raises,
        unless a larger communicator helps.
        """
        if self.is_closed:
            raise ClosedError("these communicators have been aborted")
        if self._capacity is None:
            self._grow(need, device)
            return self._run(call)
        try:
            return self._run(call)
        except Exception as error:
            if not self._is_rejection(error, device) or not self._grow(need, device):
                raise
        return self._run(call)

    def rejecting(self) -> Rejecting:
        """Make an error inside a rejection of the ``run`` that all other ranks call: they raise at once, too."""
        return Rejecting(self._reject)

    def _reject(self, reason: str) -> None:
        def call(comm: Communicator, _: Need) -> None:
            with comm.rejecting():
                raise _RejectedHereError(reason)

        nothing = Need(num_topk=1, max_tokens_per_rank=1, max_bytes_per_token=1)
        with suppress(_RejectedHereError):
            if self._capacity is None:
                self._grow(nothing, self._device, reason)
            else:
                self.run(nothing, self._device, call)

    def rejecting_latest(self) -> AbstractContextManager[None]:
        """Likewise for calls along a handle, which is most likely of the latest communicator."""
        return self._communicators[-1].rejecting() if self._communicators else nullcontext()

    def _run(self, call: Callable[[Communicator, Need], _Result]) -> _Result:
        assert self._capacity is not None
        return call(self._communicators[-1], self._capacity)

    def _is_rejection(self, error: Exception, device: torch.device) -> bool:
        """Return whether a call was cancelled on all ranks together: after other errors a rank would wait for them."""
        if isinstance(error, RowOverflowError):
            return device.type == "cuda"  # of an earlier call; on the CPU of this one, which is complete
        if isinstance(error, FuscoError):
            return isinstance(error, (RejectedInputError, MismatchError, SharedMemoryError))
        return not self._communicators[-1].is_broken

    @property
    def is_closed(self) -> bool:
        """True after ``abort``."""
        return not self._finalizer.alive

    def abort(self) -> None:
        """Release all communicators without waiting for other ranks."""
        self._finalizer()

    def _grow(self, need: Need, device: torch.device, rejection: str = "") -> bool:
        """Make a larger communicator if a rank needs one; a collective. Returns whether one was made.

        With a rejection, all ranks raise: this one ``_RejectedHereError``, others ``RejectedInputError``.
        """
        group = self._group()
        if group is None:
            raise ClosedError("the process group of these calls is destroyed")
        gather = StoreGather(group, self._settings.timeout_s)
        entries = gather.all_gather("what the call needs", [asdict(need), rejection])
        if rejection:
            raise _RejectedHereError(rejection)
        reasons = [f"rank {rank} rejected its input: {reason}" for rank, (_, reason) in enumerate(entries) if reason]
        if reasons:
            raise RejectedInputError(f"the call was cancelled on all ranks, since {'; '.join(reasons)}")
        needs = [Need(**values) for values, _ in entries]
        needed = reduce(Need.union, needs, self._capacity or needs[0])
        if needed == self._capacity:
            return False
        capacity = needed.with_reserve()
        self._communicators.append(
            Communicator(
                group,
                num_experts=self._num_experts,
                **asdict(capacity),
                ranks_per_node=self._ranks_per_node,
                settings=self._settings,
                device=device,
            )
        )
        self._device = device
        self._capacity = capacity  # only now: the next call tries again if there is no room for it
        return True


def _leave(communicators: list[Any]) -> None:
    while communicators:
        communicators.pop().abort()
