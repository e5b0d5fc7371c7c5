"""Kernels that are launched again with other addresses, by one compiled function that also waits for their report."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from fusco.control.atomics import load_acquire_at, store_release_at
from fusco.control.machine_calls import call_at, yield_address
from fusco.core.compiled import compiled
from fusco.cuda.kernels.launcher import PreparedLaunch

TICKET = 0  # index of the value that a report is waited for; 0 waits for none
NOT_REPORTED, INVALID_ID = -1, -2  # outcomes; a smaller one is an error of the driver
_POLLS_PER_YIELD, _MAX_YIELDS = 500, 200  # about 0.2 ms; then the watchdog waits
_LOW_HALF = 0xFFFFFFFF

# Words of repeated launches, then of each field that changes, then of each kernel.
_LAUNCH, _YIELD, _REPORT, _NUM_FIELDS, _NUM_WORDS = range(5)
_FIELD_WORDS, _KERNEL_WORDS = 3, 3
_REPORT_OF_ID = 8  # offset of ``Report.bad_src``


class Field(NamedTuple):
    """A field of 8 bytes of a kernel's arguments: the value of this index, plus a number."""

    name: str
    value: int
    plus: int = 0
    entry: int = 0  # of a field that is an array


@compiled(nogil=True)
def _launch(words: Any, values: Any) -> int:
    """Set all fields, launch all kernels, and return the number in their report; see ``RepeatedLaunches.launch``."""
    at = _NUM_WORDS
    for _ in range(words[_NUM_FIELDS]):
        store_release_at(words[at], values[words[at + 1]] + words[at + 2])
        at += _FIELD_WORDS
    for kernel in range((len(words) - at) // _KERNEL_WORDS):
        error: int = call_at(words[_LAUNCH], words[at], words[at + 1], words[at + 2], 0)
        if error:
            return INVALID_ID - (error << 8 | (kernel + 1))
        at += _KERNEL_WORDS
    return _wait(words, values[TICKET]) if values[TICKET] else 0


@compiled(nogil=True)
def _wait(words: Any, ticket: int) -> int:
    report, polls = words[_REPORT], 0
    while True:
        seen: int = load_acquire_at(report)
        if seen & _LOW_HALF == ticket:
            is_valid = load_acquire_at(report + _REPORT_OF_ID) & _LOW_HALF == _LOW_HALF  # -1
            return seen >> 32 if is_valid else INVALID_ID
        polls += 1
        if polls % _POLLS_PER_YIELD == 0:
            if polls == _POLLS_PER_YIELD * _MAX_YIELDS:
                return NOT_REPORTED
            call_at(words[_YIELD], 0, 0, 0, 0)


class RepeatedLaunches:
    """Launches on one stream with arguments of their own, of which every call sets the same fields."""

    def __init__(
        self, launches: Sequence[tuple[PreparedLaunch, Sequence[Field]]], num_values: int, stream: int, report: int
    ) -> None:
        """Copy the arguments of kernels to launch one after the other.

        Args:
            launches: kernels with all arguments, and the fields that change.
            num_values: values that ``launch`` takes; not all of them need be in a field.
            stream: the handle of the stream.
            report: the address of a ``Report``.
        """
        self._kernels = [prepared.bound_to(stream) for prepared, _ in launches]
        fields = [
            (bound.address_of(field.name, field.entry), field.value, field.plus)
            for bound, (_, of_kernel) in zip(self._kernels, launches, strict=True)
            for field in of_kernel
        ]
        words = [self._kernels[0].driver_launch, yield_address(), report, len(fields)]
        words += [word for field in fields for word in field]
        words += [word for bound in self._kernels for word in bound.call]
        self._words = np.array(words, dtype=np.int64)
        self._values = np.zeros(num_values, dtype=np.int64)
        self._pack = partial(struct.Struct(f"{num_values}q").pack_into, self._values.data, 0)

    def launch(self, *values: int) -> int:
        """Launch all kernels with these values, the first of which is the ticket.

        Returns:
            With a ticket, the number of slots that its report has, or ``NOT_REPORTED`` after a fifth of a millisecond,
            or ``INVALID_ID``; without one, 0. Raises ``LaunchError`` if the driver does not take a kernel.
        """
        self._pack(*values)
        outcome = int(_launch(self._words, self._values))
        if outcome < INVALID_ID:
            error = INVALID_ID - outcome
            self._kernels[(error & 0xFF) - 1].fail(error >> 8)
        return outcome


def warm_up_repeated_launches() -> None:
    """Compile what launches kernels, or read it from the disk cache."""
    _launch(np.zeros(_NUM_WORDS, dtype=np.int64), np.zeros(1, dtype=np.int64))
