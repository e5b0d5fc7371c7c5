"""Plan of a dispatch, made and kept on the device."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import torch

from fusco.core.current_stream import capture_number, is_capturing
from fusco.core.placement import ExpertPlacement
from fusco.cuda.kernels.abi import address
from fusco.cuda.kernels.held_rows import HeldRows, RowAddresses
from fusco.cuda.kernels.plan import PlannedRows, PlanTensors, Runs, ends_of

SEVERAL_STREAMS = -1  # no stream has this handle
_Key = TypeVar("_Key", bound=Hashable)
_Made = TypeVar("_Made")


class CommonFields(NamedTuple):
    """Fields of ``DevicePlan``, in their order, that all plans of equal calls have in common."""

    first_row: tuple[int, ...]
    held: tuple[int, ...]
    num_topk: int
    rank: int
    placement: ExpertPlacement
    rows_per_expert: int | None
    stream: int


@dataclass
class DevicePlan(PlannedRows):
    """See ``fusco.engine.base.Plan``. Programs pass fields by position: by name, that takes twice as long."""

    tables: PlanTensors
    rank: int  # the rank that the plan is for
    placement: ExpertPlacement  # the experts of each rank
    rows_per_expert: int | None = None  # slots of each local expert; ``None`` if blocks follow each other
    stream: int = 0  # handle of the stream of all its memory, or ``SEVERAL_STREAMS``
    num_slots: int = 0  # rows of the expert-major output; set once the plan is made if they are exact
    capture: int = 0  # number of the capture of the CUDA graph that makes it; 0 if none does
    # int32 rows of each local expert, as bytes; ``None`` unless the host has waited for the plan
    reported_counts: bytes | None = None
    _by_slot: dict[str, torch.Tensor] = field(default_factory=dict, init=False)  # made so far

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All memory of the plan on the device, including what was made so far for weights and gradients."""
        return [self.tables.memory, *self._by_slot.values()]

    @property
    def num_tokens(self) -> int:
        return self.num_rows_of(self.rank)

    @property
    def num_rows_per_expert_on_host(self) -> torch.Tensor | None:
        if self.reported_counts is None:
            return None
        return torch.tensor(memoryview(self.reported_counts).cast("i").tolist(), dtype=torch.int64, device="cpu")

    @property
    def weights(self) -> torch.Tensor | None:
        """Weights of pairs, see ``PlanTensors``."""
        return self.tables.weights

    @property
    def num_rows_per_expert(self) -> torch.Tensor:
        return self.tables.num_rows_per_expert

    @property
    def num_rows_needed(self) -> torch.Tensor:
        return self.tables.num_rows_needed

    @property
    def num_dropped_per_expert(self) -> torch.Tensor:
        return self.tables.num_dropped_per_expert

    def rows_of(self, runs: Runs, local: int) -> HeldRows:
        """Return some of the rows; copied unless they follow each other in the plan. See ``run_of``."""
        if (in_run := self.run_of(runs, local)) is not None:
            return in_run
        tables, (joined, marks) = self.tables, self.joined(runs, local)
        slots, ranks = _concatenated(tables.row_to_slots, joined), _concatenated(tables.token_to_ranks, marks)
        weights = None if tables.weights is None else _concatenated(tables.weights, joined)
        addresses = RowAddresses(slots.data_ptr(), address(weights), ranks.data_ptr())
        copies = (slots, ranks) if weights is None else (slots, weights, ranks)
        return HeldRows(ends_of(runs), addresses, self.num_topk, tables.shape.weight_bytes, tensors=copies)

    @property
    def slot_weights(self) -> torch.Tensor:
        weights = self.weights
        assert weights is not None, "there are no weights by slot without weights"
        return self.kept(self._by_slot, "weights", lambda: self._of_slots(weights))

    @property
    def slot_to_k(self) -> torch.Tensor:
        return self.kept(self._by_slot, "k", self._k_of_slots)

    @property
    def slot_to_source(self) -> torch.Tensor:
        slots, first_row = self.tables.row_to_slots, self.first_row
        first = torch.tensor(first_row, dtype=torch.int64, device="cpu").to(slots.device)
        rows = torch.arange(len(slots), device=slots.device)
        src = torch.searchsorted(first, rows, right=True) - 1
        sources = (src, rows - first[src])
        return torch.stack([self._of_slots(each[:, None].expand(slots.shape)) for each in sources], 1)

    def replace_weights(self, of_slots: torch.Tensor) -> None:
        weights, slots = self.weights, self.tables.row_to_slots
        assert weights is not None, "a plan without weights has no memory for any"
        # Pairs without a slot get any weights, as kernels do not read them.
        weights.copy_(of_slots[slots.clamp(min=0), torch.arange(self.num_topk, device=slots.device)])
        self._by_slot.pop("weights", None)

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


def _concatenated(values: torch.Tensor, runs: Sequence[tuple[int, int]]) -> torch.Tensor:
    return torch.cat([values[first:end] for first, end in runs]) if runs else values[:0]
