"""A move of experts at one rank: what it sends and receives in each step, and the task that advances by steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter

import numpy as np
import torch

from fusco.control.fingerprint import Fields
from fusco.core.integers import check_integer
from fusco.core.lanes import IntArray
from fusco.engine.base import AllToAllRequest
from fusco.placement.moves import MoveSteps


@dataclass(kw_only=True)
class MoveRequest(AllToAllRequest):
    """One step of a move, rows of one byte. It is of the same move and number on all ranks."""

    step: str

    @property
    def fields(self) -> Fields:
        """The step, of how many."""
        return {"step": self.step}


class RankTransfers:
    """What one rank sends and receives in each step of a move."""

    def __init__(
        self,
        steps: MoveSteps,
        rank: int,
        read: Callable[[int, int, int], Iterator[torch.Tensor]],
        make_staging: Callable[[int], torch.Tensor],
        num_sms: int | None = None,
    ) -> None:
        """``read(i, begin, end)`` yields the bytes of the expert of transfer ``i``, which this rank has."""
        self._num_sms = num_sms
        self.plan, self.num_steps, self._steps, self._read = steps.plan, steps.num_steps, steps, read
        self._sent = _of_rank(self.plan.src_ranks, self.plan.dst_ranks, rank)
        self._received = _of_rank(self.plan.dst_ranks, self.plan.src_ranks, rank)
        self._staging, self._num_filled = make_staging(len(self._received) * self.plan.bytes_per_expert), 0
        self.arrived: dict[int, list[torch.Tensor]] = {i: [] for i in self._received}  # bytes by transfer, in order
        self.moved = np.zeros(len(self.plan.experts), np.int64)  # bytes of each transfer in all complete steps

    def request(self, step: int, meanwhile: Iterator[bool] | None = None) -> MoveRequest:
        """Return the request of a step, once all steps before it are complete; see ``AllToAllRequest``."""
        begin, end = self._steps.pieces(step)
        sent, received = ([(i, int(begin[i]), int(end[i])) for i in of] for of in (self._sent, self._received))
        pieces = [piece for transfer in sent for piece in self._pieces(*transfer)]
        output = self._staging[self._num_filled :][: sum(end - begin for _, begin, end in received)]
        return MoveRequest(
            input=self._staging[:0],
            pieces=pieces,
            output=output,
            send_rows=self._by_rank(self.plan.dst_ranks, sent),
            receive_rows=self._by_rank(self.plan.src_ranks, received),
            num_sms=self._num_sms,
            meanwhile=meanwhile,
            step=f"{step + 1} of {self.num_steps}",
        )

    def counts(self, step: int) -> list[tuple[int, ...]]:
        """Return the counts of all ranks' requests of a step."""
        begin, end = self._steps.pieces(step)
        num_bytes = np.zeros((self.plan.topology.world_size,) * 2, np.int64)
        np.add.at(num_bytes, (self.plan.src_ranks, self.plan.dst_ranks), end - begin)
        return list(map(tuple, np.concatenate((num_bytes, num_bytes.T), axis=1).tolist()))

    def end(self, step: int, request: MoveRequest) -> None:
        """Note what has arrived in a step."""
        begin, end = self._steps.pieces(step)
        first = 0
        for i in self._received:
            if size := int(end[i] - begin[i]):
                self.arrived[i].append(request.output[first : first + size])
                first += size
        self._num_filled += first
        self.moved = end

    def _pieces(self, i: int, begin: int, end: int) -> Iterator[torch.Tensor]:
        if begin == end:
            return iter(())
        parent = int(self.plan.parents[i])
        return self._read(i, begin, end) if parent < 0 else iter(self.arrived[parent][-1:])

    def _by_rank(self, peers: IntArray, moved: Sequence[tuple[int, int, int]]) -> list[int]:
        num_bytes = [0] * self.plan.topology.world_size
        for i, begin, end in moved:
            num_bytes[peers[i]] += end - begin
        return num_bytes


def _of_rank(ranks: IntArray, peers: IntArray, rank: int) -> list[int]:
    """Return the transfers of a rank, by peer."""
    mine = np.flatnonzero(ranks == rank)
    return mine[np.argsort(peers[mine], kind="stable")].tolist()


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How fast a move in the background advances.

    Args:
        step_bytes: the most bytes that a NIC sends or receives in a step, and a rank within its node, up to rounding.
        share: the most of the time since the first step that steps may take, above 0; a step that would exceed it on
            any rank moves nothing.
        bytes_per_s: the most bytes of a NIC since the first step over the time, likewise, up to a step. ``None`` means
            any.
        num_sms: on CUDA, the most SMs of a kernel that copies for a step; ``None`` means all. NCCL's kernels take the
            SMs of their channels.
    """

    step_bytes: int = 4 << 20
    share: float = 1.0
    bytes_per_s: float | None = None
    num_sms: int | None = None

    def __post_init__(self) -> None:
        check_integer("step_bytes", self.step_bytes, least=1)
        if not 0 < self.share <= 1:
            raise ValueError(f"share must be above 0 and at most 1, got {self.share}")
        if self.bytes_per_s is not None and not self.bytes_per_s > 0:
            raise ValueError(f"bytes_per_s must be positive, got {self.bytes_per_s}")
        if self.num_sms is not None:
            check_integer("num_sms", self.num_sms, least=1)


class MoveTask:
    """A move that advances in steps between other calls; ``Communicator.start_moving_experts`` makes it.

    Until it is done, all places hold their old experts, so dispatches may go on by the old placement; the weights that
    move must not change. A task that is dropped on all ranks moves nothing.
    """

    def __init__(
        self,
        transfers: RankTransfers,
        pace: Pace,
        exchange: Callable[[MoveRequest, bool], bool],
        end: Callable[[bool], bool],
    ) -> None:
        """``exchange`` runs a step, ``end`` takes the new experts in use; both return False if a rank holds back."""
        self._transfers, self._pace, self._exchange, self._end = transfers, pace, exchange, end
        self._num_complete, self._began, self._busy_s = 0, 0.0, 0.0
        self._request: MoveRequest | None = None  # of a step that a rank has held back
        self._is_paused, self.is_done = False, False

    @property
    def num_steps(self) -> int:
        """Steps in which bytes move; one more puts the new experts into their places."""
        return self._transfers.num_steps

    @property
    def progress(self) -> float:
        """Steps that are complete, of all: 0 to 1."""
        return (self._num_complete + self.is_done) / (self.num_steps + 1)

    def pause(self) -> None:
        """Move nothing on any rank, until ``resume`` or ``wait``; this rank alone may call it."""
        self._is_paused = True

    def resume(self) -> None:
        """Go on after ``pause``."""
        self._is_paused = False

    def step(self) -> bool:
        """Move the bytes of one step, a collective; return True once all new experts are in their places.

        It moves nothing if a rank is paused or ahead of its pace. Raises ``PeerFailureError`` if a rank fails; all
        places then hold their old experts.
        """
        return self._advance(is_held=self._is_paused or self._exceeds_pace())

    def wait(self) -> None:
        """Move all that is left, a collective. It ends a pause, and takes all the time."""
        self._is_paused = False
        while not self._advance(is_held=False):
            pass

    def _advance(self, *, is_held: bool) -> bool:
        begin = perf_counter()
        if not self.is_done and self._step(is_held=is_held):
            self._began = self._began or begin
            self._busy_s += perf_counter() - begin
        return self.is_done

    def _step(self, *, is_held: bool) -> bool:
        """Run a step or the end; return False if a rank holds back."""
        step, transfers = self._num_complete, self._transfers
        if step == self.num_steps:
            self.is_done = self._end(is_held)
            return self.is_done
        request = self._request = self._request or transfers.request(step)
        if not self._exchange(request, is_held):
            return False
        transfers.end(step, request)
        self._num_complete, self._request = step + 1, None
        return True

    def _exceeds_pace(self) -> bool:
        pace, passed_s = self._pace, perf_counter() - self._began
        num_bytes = self._num_complete * pace.step_bytes
        is_too_fast = pace.bytes_per_s is not None and num_bytes > pace.bytes_per_s * passed_s
        return bool(self._began) and (is_too_fast or self._busy_s > pace.share * passed_s)
