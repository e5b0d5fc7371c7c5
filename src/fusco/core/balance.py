"""What a batch may be balanced by, and what its plan says: for planners on the host and on GPUs.

Shapes: E experts, R ranks, C copies.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal

import numpy as np

from fusco.core.compiled import compiled
from fusco.core.integers import check_integer
from fusco.core.lanes import IntArray

if TYPE_CHECKING:  # as planners need no torch
    from fusco.core.placement import ExpertPlacement

# Of the search, on every device alike.
NUM_CAPS = 20  # that are tried, at most
NUM_RULES = 4  # of the ways to give and take in placement/batch.py: those without random choices
MOST_TRIES, NUM_TRIES = 32, 2048  # with random choices; the latter over the square of the number of ranks
PRECISION = 512  # parts of the aim, to which a cap is known
FIRST_GAP = 128  # parts of the aim, between it and the second cap; gaps double


@dataclass(frozen=True)
class Balance:
    """What a plan may do about a batch in which ranks have different numbers of rows.

    Args:
        spare_places: places for copied experts on each rank.
        tolerance: the plan copies no more experts once the busiest rank has at most this share above the mean.
        rows_per_copy: what it costs to copy an expert, in rows that an expert computes in that time. An expert is not
            copied where this exceeds what the busiest rank is spared. The default, 0, is for copies that are hidden.
    """

    spare_places: int
    tolerance: float = 0.02
    rows_per_copy: float = 0.0

    def __post_init__(self) -> None:
        check_integer("spare_places", self.spare_places, least=0)
        for name in ("tolerance", "rows_per_copy"):
            if not 0 <= (value := getattr(self, name)) < float("inf"):
                raise ValueError(f"{name} must be at least 0 and finite, got {value!r}")

    def check_placement(self, placement: ExpertPlacement) -> None:
        """Raise ``ValueError`` unless a placement has one place of each expert, and the spare places on each rank."""
        spare = min((row.count(-1) for row in placement.physical_to_logical or ()), default=0)
        if spare < self.spare_places:
            raise ValueError(
                f"{self.spare_places} spare places are asked for, but the placement has {spare} empty ones on a rank: "
                f"make the communicator with expert_placement=ExpertPlacement.contiguous(...).in_places(...)"
            )
        if placement.lost_experts:
            raise ValueError(f"expert {placement.lost_experts[0]} is lost, as no rank has it; place it first")
        for expert, owners in enumerate(placement.expert_to_physical):
            if len(owners) > 1:
                raise ValueError(f"expert {expert} has {len(owners)} places; a batch is planned from one home of each")


@dataclass(frozen=True)
class BatchPlan:
    """Copies of one batch: expert ``experts[i]`` is copied to rank ``ranks[i]``, which computes ``rows[i]`` rows.

    Attributes:
        rows_per_expert: int64 (E,), the rows of all ranks for each expert.
        experts, ranks, rows: int64 (C,), in the order in which they were chosen. No rank has an expert twice.
        loads: int64 (R,), the rows of each rank with these copies.
        loads_before: int64 (R,), the rows of each rank without copies.
        limit: why the busiest rank has more than the tolerance: no rank with a spare place has room (``"places"``), or
            copies cost more than they save (``"copies"``); empty if it has not.
    """

    experts: IntArray
    ranks: IntArray
    rows: IntArray
    loads: IntArray
    loads_before: IntArray
    limit: Literal["", "places", "copies"]
    rows_per_expert: IntArray

    @classmethod
    def of_copies(
        cls, rows: IntArray, homes: IntArray, num_ranks: int, balance: Balance, copies: IntArray, *, is_aim_held: bool
    ) -> BatchPlan:
        """Return the plan of copies (C, 3): expert, rank and rows of each."""
        experts, ranks, moved = copies.T
        before = np.bincount(homes, weights=rows, minlength=num_ranks).astype(np.int64)
        aim = aim_of(int(before.sum()), num_ranks, float(balance.tolerance))
        loads = before + np.bincount(ranks, moved, num_ranks).astype(np.int64)
        loads -= np.bincount(homes[experts], moved, num_ranks).astype(np.int64)
        return cls(experts, ranks, moved, loads, before, limit_of(loads, aim, is_aim_held=is_aim_held), rows)

    @cached_property
    def busiest_over_mean(self) -> float:
        """Rows of the busiest rank over the mean of all ranks; 1 for a batch without rows."""
        return _over_mean(self.loads)

    @cached_property
    def busiest_over_mean_before(self) -> float:
        """The same without copies."""
        return _over_mean(self.loads_before)

    @property
    def spared_rows(self) -> int:
        """Rows that copies spare the busiest rank."""
        return int(self.loads_before.max(initial=0) - self.loads.max(initial=0))

    def break_even_tokens(self, num_tokens: int, copies_us: float, row_us: float) -> int | None:
        """Return the tokens of all ranks from which on copies that nothing hides save more than they take.

        Args:
            num_tokens: of this batch, whose routing all batches have.
            copies_us: time in which all copies arrive.
            row_us: time in which an expert computes a row.

        Returns:
            ``None`` if copies save nothing.

        >>> rows, homes, copies = np.array([50, 30, 10, 10]), np.array([0, 0, 1, 1]), np.array([[0, 1, 30]])
        >>> plan = BatchPlan.of_copies(rows, homes, 2, Balance(1, tolerance=0), copies, is_aim_held=True)
        >>> plan.break_even_tokens(100, copies_us=6.0, row_us=0.1)
        200
        """
        saved_us = self.spared_rows * row_us
        return round(num_tokens * copies_us / saved_us) if saved_us else None


def limit_of(loads: IntArray, aim: int, *, is_aim_held: bool) -> Literal["", "places", "copies"]:
    """Return why a plan with these loads does not hold the aim, as ``BatchPlan.limit``."""
    if loads.max() <= aim:
        return ""
    return "copies" if is_aim_held else "places"


def _over_mean(loads: IntArray) -> float:
    total = int(loads.sum())
    return float(loads.max()) * len(loads) / total if total else 1.0


@compiled()
def aim_of(total: int, num_ranks: int, tolerance: float) -> int:
    """Return the rows that no rank should exceed, of a batch with ``total``."""
    return max(-(-total // num_ranks), int(total * (1 + tolerance) / num_ranks))
