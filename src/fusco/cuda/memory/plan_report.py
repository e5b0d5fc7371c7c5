"""Report of plans in host memory, read in the order in which the device writes it."""

from __future__ import annotations

from typing import NamedTuple

from fusco.control.flags import Flags
from fusco.cuda.kernels.comm import Report

_LOW_HALF = 0xFFFFFFFF


class InvalidPair(NamedTuple):
    """An id that is not an expert, of a token of a rank; clamped to +-(2**31 - 1)."""

    src: int
    token: int
    k: int
    expert: int


class Overflow(NamedTuple):
    """A plan that needed more than there was: slots, or rows of one local expert."""

    needed: int
    limit: int
    local_expert: int | None


class PlanReport:
    """Reads and clears a ``Report``, a word of 8 bytes at a time: each has what the device writes last in its low half.

    A load that acquires it comes before those of what the device has written earlier, on any processor.
    """

    def __init__(self, words: Flags) -> None:
        self._words = words

    @property
    def ticket(self) -> int:
        """Number of the latest plan that has reported."""
        return self._words.load(0) & _LOW_HALF

    def num_slots(self, ticket: int) -> int | None:
        """Return the slots that the plan of a ticket needs; ``None`` unless it is the latest that has reported."""
        word = self._words.load(0)
        return word >> 32 if word & _LOW_HALF == ticket else None

    def take_invalid_pair(self, *, is_static: bool) -> InvalidPair | None:
        """Return and clear the first invalid id: of a plan that the host waits for, or of those into static rows."""
        at = (Report.bad_static if is_static else Report.bad).offset // 8
        first = self._words.load(at)
        if first & _LOW_HALF == _LOW_HALF:
            return None
        second = self._words.load(at + 1)
        self._words.store(at, -1)  # the device may write another one now
        return InvalidPair(first & _LOW_HALF, first >> 32, second & _LOW_HALF, second >> 32)

    def take_overflow(self) -> Overflow | None:
        """Return and clear the first overflow."""
        at = Report.overflow_needed.offset // 8
        word = self._words.load(at)
        if not word & _LOW_HALF:
            return None
        number = self._words.load(Report.begun.offset // 8) >> 32  # overflow_expert
        self._words.store(at, 0)  # the device may write another one now
        return Overflow(word & _LOW_HALF, word >> 32, number - 1 if number else None)
