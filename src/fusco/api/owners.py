"""The owner of each row of a dispatch, where an expert is in several places; the placement can be replaced."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from fusco.api.collective import run_collective
from fusco.api.validation import Validator
from fusco.control.fingerprint import CollectiveFingerprint, Fields
from fusco.control.layout import ControlLayout
from fusco.control.session import Session
from fusco.core.lanes import IntArray
from fusco.core.placement import ExpertPlacement
from fusco.core.profile import Call
from fusco.engine.base import Engine, KnownCall, Pending, Request
from fusco.engine.owner_choice import OwnerChoice
from fusco.planner.owners import Int32Array, OwnerTables
from fusco.planner.routing import INDEX_DTYPES, Routing


@dataclass(kw_only=True)
class PlaceRequest(Request):
    """A placement that replaces the present one, and this rank's tables of it."""

    placement: ExpertPlacement
    tables: OwnerTables

    @property
    def fields(self) -> Fields:
        """Fields of the fingerprint."""
        return {"placement": self.placement.digest}


class Owners:
    """Turns the experts that a caller names into physical experts, those that plans know.

    Attributes:
        placement: the present placement.
    """

    def __init__(self, session: Session, engine: Engine[Any], validator: Validator) -> None:
        self._session, self._engine, self._validator = session, engine, validator
        self.placement = validator.caller_placement or validator.placement
        self._choice: OwnerChoice | None = None
        # Graphs may be captured now and replayed after another placement.
        self._is_always_chosen = self.placement.has_places and engine.is_asynchronous
        self._max_counts = 2 * ControlLayout(engine.topology).max_counts
        if self.placement.has_places:
            self._take(self.placement, self._tables_of(self.placement))

    @property
    def are_chosen(self) -> bool:
        """False if all ids are those of physical experts already."""
        return self._choice is not None and (self._is_always_chosen or not self._tables.is_identity)

    def choose(self, topk_idx: torch.Tensor) -> torch.Tensor:
        """Return physical experts for ids of a dispatch; a collective if they depend on the counts of all ranks.

        What is no valid ``topk_idx`` is returned as it is, for ``dispatch`` to reject.
        """
        bounds = self._divide(topk_idx) if self._tables.needs_counts else None
        is_tensor = isinstance(topk_idx, torch.Tensor) and topk_idx.device == self._validator.device
        if not is_tensor or topk_idx.dtype not in INDEX_DTYPES or self._session.broken or self._choice is None:
            return topk_idx
        return self._choice.choose(topk_idx.detach(), bounds)

    def place(self, given: object) -> None:
        """Replace the placement, on all ranks."""

        def prepare(request: PlaceRequest, call: Call) -> Pending[None]:  # noqa: ARG001
            return Pending((), lambda _: self._take(request.placement, request.tables))

        run_collective(self._session, self._engine, "place", partial(self._validate, given), prepare)

    def _validate(self, given: object) -> PlaceRequest:
        self._validator.require_not_capturing("place")
        physical, num_experts = self._validator.placement, self.placement.num_experts
        num_ranks = physical.world_size
        if physical.has_places or len(set(map(len, physical.rank_to_experts))) > 1 or not physical.is_contiguous:
            raise ValueError(
                f"this communicator was made with the rank of each expert, {physical.expert_to_rank}; to place experts "
                f"anew, make it with expert_placement=ExpertPlacement.replicated(...)"
            )
        if given is None:
            raise TypeError("place takes a placement, got None")
        places_per_rank = physical.num_experts // num_ranks
        placement = ExpertPlacement.of(num_experts, given, num_ranks).in_places(places_per_rank)
        return PlaceRequest(placement=placement, tables=self._tables_of(placement))

    def _tables_of(self, placement: ExpertPlacement) -> OwnerTables:
        return OwnerTables.of(placement, self._validator.rank, self._engine.topology)

    def _take(self, placement: ExpertPlacement, tables: OwnerTables) -> None:
        if self._choice is None:
            self._choice = self._engine.owner_choice()
        self._choice.place(tables)
        self.placement, self._tables = placement, tables
        fields: Fields = {"placement": placement.digest, "divided_experts": len(tables.divided)}
        self._known = KnownCall(CollectiveFingerprint("dispatch", fields))

    def _divide(self, topk_idx: torch.Tensor) -> Int32Array:
        """Exchange the counts of experts that have shares, and return this rank's bounds."""
        session, counts = self._session, np.zeros(0, np.int64)
        if session.has_published:  # by a call that was interrupted before it went on
            with session.access.using("dispatch"):
                session.end_interrupted()
        gathered: list[IntArray] = []
        for first in range(0, len(self._tables.divided), self._max_counts):

            def validate() -> Request:
                self._validate_ids(topk_idx)
                return Request(known=self._known)

            def prepare(request: Request, call: Call, first: int = first) -> Pending[IntArray]:  # noqa: ARG001
                nonlocal counts
                if not first:
                    assert self._choice is not None
                    counts = self._choice.count(topk_idx)
                return Pending(_packed(counts[first : first + self._max_counts]), _unpacked)

            gathered.append(run_collective(session, self._engine, "dispatch", validate, prepare))
        num_divided = len(self._tables.divided)
        return self._tables.divide_rows(np.concatenate(gathered, axis=1)[:, :num_divided])

    def _validate_ids(self, topk_idx: torch.Tensor) -> None:
        routing = Routing(topk_idx)
        self._validator.require_routing(routing)
        self._validator.require_not_capturing("a dispatch that divides rows by shares")
        if self._validator.device.type == "cpu":
            routing.check_expert_ids(self.placement.num_experts)


def _packed(counts: IntArray) -> Sequence[int]:
    """Return counts below 2**32, two in each integer."""
    even = counts if len(counts) % 2 == 0 else np.append(counts, 0)
    packed: list[int] = even.astype(np.uint32).view(np.int64).tolist()
    return packed


def _unpacked(counts: Sequence[Sequence[int]]) -> IntArray:
    """Return the counts of all ranks, int64 (R, D), perhaps with a column of zeros at the end."""
    return np.array(counts, dtype=np.int64).reshape(len(counts), -1).view(np.uint32).astype(np.int64)
