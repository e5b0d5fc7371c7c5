"""Communicators of a process group that frameworks share: one for each number of experts, which grow with the calls."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial, reduce
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from fusco.api.communicator import Communicator
from fusco.api.membership import Rejecting
from fusco.control.fingerprint import REJECTION, CollectiveFingerprint, check_fingerprints
from fusco.control.store_gather import StoreGather
from fusco.core.config import Capacity, Settings
from fusco.core.errors import ClosedError
from fusco.core.quantization import Quantize
from fusco.core.rows import row_bytes

_Result = TypeVar("_Result")


_LEAST = Capacity(num_topk=1, max_tokens_per_rank=1, max_bytes_per_token=1)


class GroupCommunicators:
    """The communicators of a group; in turn, and on all ranks the same.

    Frameworks tell no sizes. The first dispatch to a number of experts makes a communicator with room for what all
    ranks need, and later ones make more room in it (``Communicator.fitting``).

    A call may use another communicator than the one before. All ranks then agree on it in that of the call before. So
    ranks that are out of step never wait for each other in two communicators: all raise ``MismatchError``, and their
    next call is in step.
    """

    def __init__(
        self, group: dist.ProcessGroup, *, ranks_per_node: int | None = None, settings: Settings | None = None
    ) -> None:
        """Nothing is allocated before the first call. The device is that of each first dispatch's tensors."""
        # Weak, so that one may live as long as its group.
        self._group = weakref.ref(group)
        self._ranks_per_node, self._settings = ranks_per_node, settings or Settings()
        self._communicators: dict[int, Communicator] = {}  # by number of experts
        self.current: Communicator | None = None  # of the latest call; the same on all ranks
        self._purpose = ("", 0)  # of the latest dispatch
        self._finalizer = weakref.finalize(self, _leave, self._communicators)

    def run(
        self,
        purpose: tuple[str, int],
        num_experts: int,
        need: Capacity,
        device: torch.device,
        dispatch: Callable[[Communicator], _Result],
    ) -> _Result:
        """Return ``dispatch`` of the communicator for so many experts, once it has room; a collective.

        ``dispatch`` calls ``Communicator.dispatch`` and no other collective. ``purpose`` is what all ranks must agree
        on: a name of the call, and the number of experts that it is for. Raises what ``dispatch`` raises.
        """
        if self.is_closed:
            raise ClosedError("these communicators have been aborted")
        comm = self._communicators.get(num_experts)
        if self.current is not None and (comm is not self.current or purpose != self._purpose):
            before = "" if purpose == self._purpose else f" after {_operation(self._purpose)}"
            self._agree(_operation(purpose) + before)
        if comm is None:
            comm = self._make(_operation(purpose), num_experts, need, device)
        self.current, self._purpose = comm, purpose
        return self._fitting(comm, need, partial(dispatch, comm))

    def need_of(
        self,
        payloads: Sequence[torch.Tensor],
        num_topk: int,
        max_tokens: int = 1,
        values_per_element: int = 1,
        quantize: Quantize | None = None,
    ) -> Capacity:
        """Return what a dispatch of payloads (num_tokens, ...) needs, and the combine along its handle.

        Results of FP8 rows, and of bytes with two FP4 values each, come back in 16 bits a value, and along a handle
        float32 weights are sent with rows.
        """
        first = payloads[0]
        if first.ndim < 2:
            raise ValueError(f"rows must be (num_tokens, hidden), got shape {tuple(first.shape)}")
        num_bytes = quantize.row_bytes(first.shape[1]) if quantize else sum(map(row_bytes, payloads))
        sum_bytes = values_per_element * (2 if self._settings.sum_dtype is None else 4)  # of partial sums
        return Capacity(
            num_topk=num_topk,
            max_tokens_per_rank=max(len(first), max_tokens),
            max_bytes_per_token=max(num_bytes, first.shape[1:].numel() * sum_bytes) + 4 * num_topk,
        )

    def turn_to(self, comm: Communicator, verb: str) -> Communicator:
        """Return a handle's communicator for a call along it; a collective if the call before was in another."""
        if comm is not self.current:
            self._agree(f"{verb} along a handle of a communicator for {comm.placement.num_experts} experts")
            self.current = comm
        return comm

    def rejecting(self) -> Rejecting:
        """Make an error inside a rejection of the call that all other ranks make: they raise at once, too."""
        if self.current is not None:
            return self.current.rejecting()
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
        if self.current is not None and not self.current.is_broken:
            self.current.agree(operation)

    def _fitting(self, comm: Communicator, need: Capacity, dispatch: Callable[[], _Result]) -> _Result:
        return comm.fitting(need, dispatch)

    def _make(self, operation: str, num_experts: int, need: Capacity, device: torch.device) -> Communicator:
        """Make a communicator that has room for what all ranks need; a collective."""
        room = reduce(Capacity.union, self._gather(operation, need)).with_reserve()
        comm = Communicator(
            self._group(),
            num_experts=num_experts,
            **asdict(room),
            ranks_per_node=self._ranks_per_node,
            settings=self._settings,
            device=device,
        )
        comm.take_turns()  # engines run each of two micro-batches in a thread of its own
        self._communicators[num_experts] = comm
        return comm

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


def _leave(communicators: dict[int, Any]) -> None:
    while communicators:
        communicators.popitem()[1].abort()
