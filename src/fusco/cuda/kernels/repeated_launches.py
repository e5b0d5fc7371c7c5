"""Kernels that are launched again with other addresses, by one compiled function; another waits for their report."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from fusco.control.atomics import load_acquire_at, store_release_at
from fusco.control.machine_calls import NUM_ARGUMENTS, NUM_YIELD_WORDS, call_at, yield_since, yield_words
from fusco.core.compiled import compiled
from fusco.cuda.kernels.comm import Report
from fusco.cuda.kernels.launcher import PreparedLaunch
from fusco.cuda.kernels.library import BoundLaunch

TICKET = 0  # index of the value that a plan reports; 0 for none
NOT_REPORTED, HAS_ERROR = -1, -2  # outcomes of a wait
_POLLS_PER_YIELD, _YIELDS_PER_MS = 500, 1000
_LOW_HALF = 0xFFFFFFFF
_CALL_BITS = 16  # of the outcome of a call that fails: between 64 nodes there are more than 255 calls

# Words of repeated launches, then of each field that changes, then of each call.
_REPORT, _MAX_YIELDS, _NUM_FIELDS, _YIELD = range(4)
_NUM_WORDS = _YIELD + NUM_YIELD_WORDS
_FIELD_WORDS, _CALL_WORDS = 3, 1 + NUM_ARGUMENTS
_IDS, _STATIC_IDS, _OVERFLOW = (at.offset for at in (Report.bad, Report.bad_static, Report.overflow_needed))
CONSTANT = -1


class Field(NamedTuple):
    """A field of 8 bytes of a kernel's arguments: the value of this index, plus a number.

    With ``CONSTANT`` it is the number alone.
    """

    name: str
    value: int
    plus: int = 0
    entry: int = 0  # of a field that is an array


@dataclass(frozen=True)
class NativeCall:
    """Call of a C function that returns 0, or an error."""

    function: int  # its address
    arguments: tuple[int, ...]  # at most six
    fail: Callable[[int], object]  # raises the error of another result
    # for the index of an argument, the index of a value that is added to it
    values: Mapping[int, int] = field(default_factory=dict)


PreparedFields: TypeAlias = tuple[PreparedLaunch, Sequence[Field]]


@compiled(nogil=True)
def _launch(words: Any, values: Any) -> int:
    """Set all fields, make all calls, and return 0, or the error of a call and its number."""
    at = _NUM_WORDS
    for _ in range(words[_NUM_FIELDS]):
        store_release_at(words[at], values[words[at + 1]] + words[at + 2])
        at += _FIELD_WORDS
    for call in range((len(words) - at) // _CALL_WORDS):
        error: int = call_at(
            *(words[at], words[at + 1], words[at + 2], words[at + 3], words[at + 4], words[at + 5], words[at + 6])
        )
        if error:
            return error << _CALL_BITS | call
        at += _CALL_WORDS
    return 0


@compiled(nogil=True)
def _wait(words: Any, ticket: int) -> int:
    """Return the number in the report of a ticket; see ``RepeatedLaunches.wait``."""
    report, polls, since_ns = words[_REPORT], 0, 0
    while True:
        seen: int = load_acquire_at(report)
        if seen & _LOW_HALF == ticket:
            invalid = load_acquire_at(report + _IDS) & load_acquire_at(report + _STATIC_IDS) & _LOW_HALF
            has_error = invalid != _LOW_HALF or load_acquire_at(report + _OVERFLOW) & _LOW_HALF != 0  # no id is -1
            return HAS_ERROR if has_error else seen >> 32
        polls += 1
        if polls % _POLLS_PER_YIELD == 0:
            since_ns = yield_since(words[_YIELD:], since_ns)
            if since_ns < 0 or polls == _POLLS_PER_YIELD * words[_MAX_YIELDS]:
                return NOT_REPORTED


class RepeatedLaunches:
    """Kernels launched on one stream, with arguments of their own, and other calls; every call sets the same fields."""

    def __init__(
        self,
        launches: Sequence[PreparedFields | NativeCall],
        num_values: int,
        stream: int,
        report: int,
        patience_ms: float = 0.2,
    ) -> None:
        """Copy the arguments of what is to be called one after the other.

        Args:
            launches: kernels with all arguments, and the fields that change; and calls.
            num_values: values that ``launch`` takes; not all of them need be in a field.
            stream: the handle of the stream of all kernels.
            report: the address of a ``Report``.
            patience_ms: how long ``wait`` waits for it; then the watchdog does.
        """
        self._kernels: list[BoundLaunch] = []
        fields: list[int] = []
        calls = [each if isinstance(each, NativeCall) else self._bind(each, stream, fields) for each in launches]
        self._fails = [call.fail for call in calls]
        num_fields = len(fields) // _FIELD_WORDS + sum(len(call.values) for call in calls)
        first_call = _NUM_WORDS + _FIELD_WORDS * num_fields
        self._words = np.zeros(first_call + _CALL_WORDS * len(calls), dtype=np.int64)
        for number, call in enumerate(calls):
            at = first_call + _CALL_WORDS * number
            self._words[at : at + 1 + len(call.arguments)] = [call.function, *call.arguments]
            for argument, value in call.values.items():
                fields += [self._words.ctypes.data + 8 * (at + 1 + argument), value, call.arguments[argument]]
        head = [report, int(patience_ms * _YIELDS_PER_MS), num_fields, *yield_words()]
        self._words[:first_call] = [*head, *fields]
        self._values = np.zeros(num_values, dtype=np.int64)
        self._pack = partial(struct.Struct(f"{num_values}q").pack_into, self._values.data, 0)

    def _bind(self, launch: PreparedFields, stream: int, fields: list[int]) -> NativeCall:
        """Return the call of a kernel's launch; add the words of its fields."""
        prepared, of_kernel = launch
        bound = prepared.bound_to(stream)
        self._kernels.append(bound)  # has the memory of its arguments
        for each in of_kernel:
            address = bound.address_of(each.name, each.entry)
            if each.value == CONSTANT:
                ctypes.c_uint64.from_address(address).value = each.plus
            else:
                fields += [address, each.value, each.plus]
        return NativeCall(bound.driver_launch, (*bound.call, 0), bound.fail)

    def launch(self, *values: int) -> int:
        """Make all calls with these values, the first of which is the ticket, or 0.

        Returns 0, or raises the error of a call that fails, for a kernel ``LaunchError``.
        """
        self._pack(*values)
        failed: int = _launch(self._words, self._values)
        if failed:
            self._fails[failed % (1 << _CALL_BITS)](failed >> _CALL_BITS)
        return failed

    def wait(self, ticket: int) -> int:
        """Return the number of slots in the report of a ticket that has been launched.

        It is ``NOT_REPORTED`` when the patience has ended, and ``HAS_ERROR`` if this plan or an earlier one
        has reported an invalid id or an overflow.
        """
        outcome: int = _wait(self._words, ticket)
        return outcome


def warm_up_repeated_launches() -> None:
    """Compile what launches kernels and waits for them, or read it from the disk cache."""
    words, report = np.zeros(_NUM_WORDS, dtype=np.int64), np.zeros(ctypes.sizeof(Report) // 8, dtype=np.int64)
    words[_REPORT] = report.ctypes.data
    _launch(words, np.zeros(1, dtype=np.int64))
    _wait(words, 0)
