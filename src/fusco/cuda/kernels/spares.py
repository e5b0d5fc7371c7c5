"""Spare plans: allocated for several calls at a time, for the shapes used lately."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import suppress
from typing import Any, Generic, TypeVar

_Plan = TypeVar("_Plan")

_MAX_TOGETHER, _MAX_BYTES_TOGETHER = 16, 1 << 18  # in one allocation, unless a plan by itself is larger
_MAX_HOLDERS = 64  # shapes with spare plans
MAX_SPARE_BYTES = _MAX_HOLDERS * _MAX_BYTES_TOGETHER


def num_together(plan_bytes: int) -> int:
    """Return how many plans to allocate together.

    >>> num_together(100), num_together(100_000), num_together(1_000_000)
    (16, 2, 1)
    """
    return max(1, min(_MAX_TOGETHER, _MAX_BYTES_TOGETHER // max(1, plan_bytes)))


class SpareLimit:
    """Limit of the spare plans of one communicator: ``MAX_SPARE_BYTES``, whatever shapes it has seen."""

    def __init__(self) -> None:
        self._holders: dict[Spares[Any], None] = {}  # the one that has allocated last is at the end

    def admit(self, holder: Spares[Any]) -> None:
        """Note that a shape has new spare plans; free those of the least recently used shape."""
        self._holders.pop(holder, None)
        self._holders[holder] = None
        if len(self._holders) > _MAX_HOLDERS:
            oldest = next(iter(self._holders))
            del self._holders[oldest]
            oldest.drop()


class Spares(ABC, Generic[_Plan]):
    """Spare plans of one shape, allocated on the current stream when first needed; all must be for that stream."""

    def __init__(self, limit: SpareLimit) -> None:
        self._limit = limit
        self._spare: list[_Plan] = []
        self._are_several = False  # allocated together, lately

    def take(self) -> _Plan:
        """Return a new plan: an allocation takes as long as a launch, so mostly one of several made together."""
        if not self._spare:
            self._fill()
        return self._spare.pop()

    def refill(self) -> None:
        """Allocate several plans if none is left, as far as there is memory; for a time in which the host waits."""
        if self._are_several and not self._spare:
            with suppress(RuntimeError):  # of PyTorch; running out of memory is one
                self._fill()

    def _fill(self) -> None:
        self._spare = self._allocate()
        self._are_several = len(self._spare) > 1
        if self._are_several:
            self._limit.admit(self)

    def drop(self) -> None:
        """Free what is spare."""
        self._spare = []

    @abstractmethod
    def _allocate(self) -> list[_Plan]:
        """Return ``num_together`` new ones."""
