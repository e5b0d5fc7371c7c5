"""Ranks that are masked in low-latency mode: those that are absent from a communicator, which goes on without them."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from fusco.api.communicator import Communicator
from fusco.control.joining import JoinStore
from fusco.core.config import Capacity, Settings
from fusco.core.current_stream import is_capturing
from fusco.core.errors import ExcludedError, MismatchError, PeerFailureError, TransportError
from fusco.integrations.group_communicators import GroupCommunicators

_Result = TypeVar("_Result")
_LEAST = Capacity(num_topk=1, max_tokens_per_rank=1, max_bytes_per_token=16)  # until the first call
_POLL_S, _COMING_BACK_S = 0.02, 600.0
_SIZES = 0, "sizes"  # a key in the store; processes that join are numbered from 1


class MaskedCommunicator(GroupCommunicators):
    """The communicator of low-latency calls whose ranks can be masked, in place of several.

    It is made with the buffer, so that ranks know of each other before any call, and is resized for the calls; handles
    of before are invalid. A call is complete once it is on all ranks (``complete``): a rank that fails or is late in it
    is masked, as in DeepEP, and the ranks that are left make the call again.
    """

    def __init__(self, group: dist.ProcessGroup, settings: Settings | None = None) -> None:
        """Make the communicator; a collective."""
        super().__init__(group, settings=settings)
        self._rank, self._num_ranks = dist.get_rank(group), dist.get_world_size(group)
        self._name = f"low-latency mode of ranks {dist.get_process_group_ranks(group)}"
        self._num_completed, self._is_left_out = 0, False
        self._device = torch.device("cpu")
        self.current = super()._make(self._name, self._num_ranks, _LEAST, self._device)
        self._communicators[0] = self._communicators.pop(self._num_ranks)  # the first call resizes it
        store = self.comm._store  # noqa: SLF001  of the process group
        assert store is not None
        self._store, self._joins = store, JoinStore(store, self._name, self._settings.timeout_s / 2)

    @property
    def comm(self) -> Communicator:
        """The communicator in its present form, which its topology names."""
        assert self.current is not None
        return self.current

    @property
    def masked(self) -> list[int]:
        """The ranks that are absent, ascending."""
        return [rank for rank in range(self._num_ranks) if rank not in self.comm.ranks]

    def complete(self, call: Callable[[], _Result]) -> _Result:
        """Return the result of a collective that is complete on all ranks; the host waits for it.

        A call that fails on some ranks may be complete on others, so all agree afterwards. Once one rank has passed
        that, all have made the call. In the capture of a graph nothing waits, and a failure shows in its replay.
        """
        if is_capturing():
            return call()
        results: list[_Result] = []
        while True:
            try:
                if self.comm.is_broken:  # an input was rejected when a rank had failed
                    self._go_on()
                results[:] = [call()]
                self.comm.synchronize()
                self.comm.agree("the end of a low-latency call")
                break
            except (PeerFailureError, MismatchError):
                if not self.comm.is_broken:
                    raise
                if self._go_on() > self._num_completed:
                    break
        self._num_completed += 1
        return results[0]

    def mask(self, rank: int) -> None:
        """Go on without a rank: a collective of the others, which that rank may call, too."""
        if rank in self.masked or self._is_left_out:
            return
        self.comm.shrink([rank])
        self._is_left_out = rank == self._rank
        self._renew()

    def unmask(self, rank: int | None = None) -> None:
        """Take in the ranks that ask to come back, if any: a collective of those that take part.

        A rank that was left out asks, and waits until the others call this.
        """
        try:
            if self._is_left_out:
                self._come_back()
            elif not (self.masked if rank is None else rank in self.masked) or not self.comm.grow(name=self._name):
                return
            self._renew()
            self._num_completed = self._most_completed()
        except PeerFailureError:
            if self._is_left_out or not self.comm.is_broken:
                raise
            self._num_completed = self._go_on()

    def _go_on(self) -> int:
        """Go on without ranks that fail; return the most calls that a rank has completed."""
        while True:
            try:
                self.comm.shrink()
                self._renew()
                return self._most_completed()
            except ExcludedError:
                self._is_left_out = True
                raise
            except (PeerFailureError, MismatchError):  # the latter if a rank was in the middle of a resize
                if not self.comm.is_broken:
                    raise

    def _most_completed(self) -> int:
        counts = self.comm.agree("the number of low-latency calls", [self._num_completed])
        return max(count for (count,) in counts)

    def _renew(self) -> None:
        """Take the communicator in its new form; the next call agrees again what it is."""
        self._purpose = ("", 0)
        self._say_sizes()

    def _come_back(self) -> None:
        """Join the others with the sizes that they have now; again if they change them or one fails meanwhile."""
        self.comm.abort()
        tried, deadline = None, time.monotonic() + _COMING_BACK_S
        while True:
            sizes, left_s = self._sizes_of_others(), deadline - time.monotonic()
            arguments = {"settings": self._settings, "join_timeout_s": left_s, **sizes}
            try:
                comm = Communicator.join(self._store, rank=self._rank, name=self._name, **arguments)
                break
            except MismatchError:
                if sizes == tried:
                    raise
                tried = sizes
            except PeerFailureError:
                if left_s <= 0:
                    raise
            time.sleep(_POLL_S)
        comm.take_turns()
        self.current, self._is_left_out, self._device = comm, False, torch.device(sizes["device"])
        self._communicators.clear()
        self._communicators[sizes["num_experts"]] = comm

    def _sizes_of_others(self) -> dict[str, Any]:
        deadline = time.monotonic() + self._settings.timeout_s
        while (sizes := self._joins.within_limit(lambda: self._joins.get(*_SIZES))) is None:
            if time.monotonic() > deadline:
                raise TransportError(f"no rank has gone on without rank {self._rank}, which wants to come back")
            time.sleep(_POLL_S)
        return dict(sizes)

    def _fitting(self, comm: Communicator, need: Capacity, dispatch: Callable[[], _Result]) -> _Result:
        return comm.fitting(need, dispatch, self._resize)

    def _make(self, _: str, num_experts: int, need: Capacity, device: torch.device) -> Communicator:
        self._device = device
        self._resize(need, num_experts=num_experts, device=device)
        self._communicators.clear()
        self._communicators[num_experts] = self.comm
        return self.comm

    def _resize(self, need: Capacity, **changes: Any) -> None:
        self.comm.resize(**asdict(self.comm.room_of_all(need)), **changes)
        self._say_sizes()

    def _say_sizes(self) -> None:
        """Say in the store with what a rank that is masked comes back; without the store none can."""
        if self.masked and self._rank == self.comm.ranks[0]:
            num_experts, capacity = self.comm.placement.num_experts, asdict(self.comm.capacity)
            sizes = {"num_experts": num_experts, "device": self._device.type, **capacity}
            with suppress(TransportError):
                self._joins.within_limit(lambda: self._joins.put(*_SIZES, sizes))
