"""Plan of a dispatch, made and kept on the device."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from fusco.core.errors import TransportError
from fusco.core.placement import ExpertPlacement
from fusco.cuda.kernels.abi import address
from fusco.cuda.kernels.held_rows import HeldRows, RowAddresses
from fusco.cuda.kernels.plan import PlannedRows

SEVERAL_STREAMS = -1  # no stream has this handle
_Key = TypeVar("_Key", bound=Hashable)
_Made = TypeVar("_Made")


def is_capturing() -> bool:
    """Return whether a CUDA graph captures the current stream; builds of PyTorch for CPUs raise if they are asked."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def capture_number() -> int:
    """Return a number of the capture that the current stream is in, of no other in this process; 0 if it is in none."""
    if not is_capturing():
        return 0
    from cuda.bindings import driver  # noqa: PLC0415  of the extra fusco[cuda]

    result, _, number, *_ = driver.cuStreamGetCaptureInfo(driver.CUstream(torch.cuda.current_stream().cuda_stream))
    if int(result):
        raise TransportError(f"the capture of a CUDA graph could not be identified: {result.name}")
    return int(number)


@dataclass(kw_only=True)
class DevicePlan(PlannedRows):
    """See ``fusco.engine.base.Plan``."""

    rank: int  # the rank that the plan is for
    placement: ExpertPlacement  # the experts of each rank
    num_slots: int  # rows of the expert-major output; set once the plan is made if they are exact
    rows_per_expert: int | None = None  # slots of each local expert; ``None`` if blocks follow each other
    # int32 rows of each local expert, as bytes; ``None`` unless the host has waited for the plan
    reported_counts: bytes | None = None
    stream: int = 0  # handle of the stream of all its memory, or ``SEVERAL_STREAMS``
    capture: int = 0  # number of the capture of the CUDA graph that makes it; 0 if none does
    _by_slot: dict[str, torch.Tensor] = field(default_factory=dict, init=False)  # made so far

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All memory of the plan on the device, including what was made so far for weights and gradients."""
        return [self.tables.memory, *self._by_slot.values()]

    def num_rows_of(self, source: int) -> int:
        return self.first_row[source + 1] - self.first_row[source]

    @property
    def num_tokens(self) -> int:
        return self.num_rows_of(self.rank)

    @property
    def num_rows_per_expert_on_host(self) -> torch.Tensor | None:
        if self.reported_counts is None:
            return None
        return torch.tensor(memoryview(self.reported_counts).cast("i").tolist(), dtype=torch.int64, device="cpu")

    @property
    def all_rows(self) -> HeldRows:
        """All rows, in order of source; with one node, ranks hold them so."""
        return HeldRows(self.first_row, self.tables.addresses, self.num_topk, self.tables.shape.weight_bytes)

    def rows_of(self, runs: Sequence[Sequence[tuple[int, int, int]]], local: int) -> HeldRows:
        """Return some of the rows; copied unless they follow each other in the plan.

        ``runs`` has, for each rank of the node, the rows that it holds, in order: (source, first, end).
        """
        tables, weight_bytes = self.tables, self.tables.shape.weight_bytes
        places = [[(self.first_row[src] + first, self.first_row[src] + end) for src, first, end in of] for of in runs]
        first_row = [0]
        for of_rank in places:
            first_row.append(first_row[-1] + sum(end - first for first, end in of_rank))
        before = dict(zip(self.held, itertools.accumulate(map(self.num_rows_of, self.held), initial=0), strict=False))
        joined = _joined(piece for of_rank in places for piece in of_rank)
        marks = _joined((before[src] + first, before[src] + end) for src, first, end in runs[local])
        if len(joined) <= 1 and len(marks) <= 1:
            begin, mark = (of[0][0] if of else 0 for of in (joined, marks))
            first_pair = begin * self.num_topk
            offsets = RowAddresses(4 * first_pair, weight_bytes * first_pair, 4 * mark)
            addresses = RowAddresses(*map(operator.add, tables.addresses, offsets))
            return HeldRows(tuple(first_row), addresses, self.num_topk, weight_bytes, offsets)
        slots, ranks = _concatenated(tables.row_to_slots, joined), _concatenated(tables.token_to_ranks, marks)
        weights = None if tables.weights is None else _concatenated(tables.weights, joined)
        addresses = RowAddresses(slots.data_ptr(), address(weights), ranks.data_ptr())
        copies = (slots, ranks) if weights is None else (slots, weights, ranks)
        return HeldRows(tuple(first_row), addresses, self.num_topk, weight_bytes, tensors=copies)

    @property
    def slot_weights(self) -> torch.Tensor:
        weights = self.weights
        assert weights is not None, "there are no weights by slot without weights"
        return self.kept(self._by_slot, "weights", lambda: self._of_slots(weights))

    @property
    def slot_to_k(self) -> torch.Tensor:
        return self.kept(self._by_slot, "k", self._k_of_slots)

    def kept(self, made: dict[_Key, _Made], key: _Key, make: Callable[[], _Made]) -> _Made:
        """Return what was made of the plan, or make it, and keep it where it stays valid.

        What a graph makes is in its own memory, and as of its latest replay: of a plan made before, in another graph or
        in none, it is not kept. And each replay changes a plan that a graph has made: nothing made of it is kept for
        calls outside.
        """
        if self.capture and self.capture != capture_number():
            return make()
        if key in made:
            return made[key]
        result = make()
        if self.capture or not is_capturing():
            made[key] = result
        return result

    def _k_of_slots(self) -> torch.Tensor:
        slots = self.tables.row_to_slots
        return self._of_slots(torch.arange(self.num_topk, device=slots.device).expand(slots.shape))

    def _of_slots(self, values: torch.Tensor) -> torch.Tensor:
        """Return values of pairs, by slot."""
        # One extra slot, for all pairs without a slot.
        slots = self.tables.row_to_slots
        slots = torch.where(slots < 0, self.num_slots, slots).long()
        return values.new_zeros(self.num_slots + 1).scatter_(0, slots.view(-1), values.reshape(-1))[:-1]


def _joined(pieces: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the runs, first and end, of pieces that follow each other; empty pieces are left out.

    >>> _joined([(2, 4), (4, 4), (9, 9), (4, 7), (8, 9)])
    [(2, 7), (8, 9)]
    """
    runs: list[tuple[int, int]] = []
    for first, end in pieces:
        if first == end:
            continue
        if runs and runs[-1][1] == first:
            runs[-1] = (runs[-1][0], end)
        else:
            runs.append((first, end))
    return runs


def _concatenated(values: torch.Tensor, runs: Sequence[tuple[int, int]]) -> torch.Tensor:
    return torch.cat([values[first:end] for first, end in runs]) if runs else values[:0]
