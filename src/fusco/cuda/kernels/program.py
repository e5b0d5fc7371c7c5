"""Program: kernels and other calls on the device, which one compiled function makes; another waits for their report."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeAlias

import numpy as np

from fusco.control.flags import load_acquire_at, store_release_at
from fusco.control.machine_calls import NUM_ARGUMENTS, NUM_YIELD_WORDS, call_at, yield_since, yield_words
from fusco.core.compiled import compiled
from fusco.core.errors import LaunchError
from fusco.core.timeline import NoTimeline, Timeline
from fusco.cuda.kernels.abi import Number, Value
from fusco.cuda.kernels.comm import Report
from fusco.cuda.kernels.launcher import KernelCall
from fusco.cuda.kernels.library import BoundLaunch, Library

TICKET = Value(0)  # what a plan reports; 0 for none
NOT_REPORTED, HAS_ERROR = -1, -2  # outcomes of a wait
_POLLS_PER_YIELD, _YIELDS_PER_MS = 500, 1000
_LOW_HALF = 0xFFFFFFFF
_CALL_BITS = 16  # of the outcome of a call that fails: between 64 nodes there are more than 255 calls

# Words of a program, then of each field that changes, then of each call.
_REPORT, _MAX_YIELDS, _NUM_FIELDS, _YIELD = range(4)
_NUM_WORDS = _YIELD + NUM_YIELD_WORDS
_FIELD_WORDS, _CALL_WORDS = 3, 1 + NUM_ARGUMENTS
_IDS, _STATIC_IDS, _OVERFLOW = (at.offset for at in (Report.bad, Report.bad_static, Report.overflow_needed))


@dataclass(frozen=True)
class NativeCall:
    """Call of a C function that returns 0, or an error."""

    function: int  # its address
    arguments: tuple[Number, ...]  # at most six
    fail: Callable[[int], object]  # raises the error of another result


Step: TypeAlias = KernelCall | NativeCall


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
    """Return the number in the report of a ticket; see ``Program.wait``."""
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


class Program:
    """Kernels on one stream, and other calls, to be launched any number of times: each time with other values."""

    def __init__(
        self, calls: Sequence[Step], num_values: int, stream: int, report: int = 0, patience_ms: float = 0.2
    ) -> None:
        """Copy the arguments of what is to be called one after the other.

        Args:
            calls: kernels, and others; each ``Value`` in an argument is one that ``launch`` is given.
            num_values: values that ``launch`` takes; not all of them need be in an argument.
            stream: the handle of the stream of all kernels.
            report: the address of a ``Report``.
            patience_ms: how long ``wait`` waits for it; then the watchdog does.
        """
        self._kernels: list[BoundLaunch] = []
        fields: list[int] = []
        native = [each if isinstance(each, NativeCall) else self._bind(each, stream, fields) for each in calls]
        self._fails = [call.fail for call in native]
        num_fields = len(fields) // _FIELD_WORDS
        num_fields += sum(isinstance(argument, Value) for call in native for argument in call.arguments)
        first_call = _NUM_WORDS + _FIELD_WORDS * num_fields
        self._words = np.zeros(first_call + _CALL_WORDS * len(native), dtype=np.int64)
        for number, call in enumerate(native):
            at = first_call + _CALL_WORDS * number
            self._words[at] = call.function
            for i, argument in enumerate(call.arguments, at + 1):
                if isinstance(argument, Value):
                    fields += [self._words.ctypes.data + 8 * i, argument.index, argument.plus]
                else:
                    self._words[i] = argument
        head = [report, int(patience_ms * _YIELDS_PER_MS), num_fields, *yield_words()]
        self._words[:first_call] = [*head, *fields]
        self._values = np.zeros(num_values, dtype=np.int64)
        self._pack = partial(struct.Struct(f"{num_values}q").pack_into, self._values.data, 0)

    def _bind(self, call: KernelCall, stream: int, fields: list[int]) -> NativeCall:
        """Return the call of a kernel's launch; add the words of fields that change."""
        bound = call.prepared.bound_to(stream)
        self._kernels.append(bound)  # has the memory of its arguments
        for name, numbers in call.fields.items():
            for entry, number in enumerate([numbers] if isinstance(numbers, (int, Value)) else numbers):
                address = bound.address_of(name, entry)
                if isinstance(number, Value):
                    fields += [address, number.index, number.plus]
                else:
                    ctypes.c_uint64.from_address(address).value = number
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


class HasTimeline(Protocol):
    """What has the timeline of launches."""

    timeline: Timeline | NoTimeline


class TimedProgram(Program):
    """Program whose kernels are spans of a timeline, each launched by itself."""

    def __init__(self, parts: Sequence[tuple[tuple[str, str], Program]], timed: HasTimeline) -> None:
        """``parts`` have track and name of each kernel's span."""
        super().__init__([], 0, 0)  # has nothing itself
        self._parts, self._timed = parts, timed

    def launch(self, *values: int) -> int:
        for (track, name), program in self._parts:
            self._timed.timeline.timed(track, name, None, program.launch, *values)
        return 0

    def wait(self, ticket: int) -> int:
        return self._parts[0][1].wait(ticket)


def warm_up_programs() -> None:
    """Compile what launches kernels and waits for them, or read it from the disk cache."""
    words, report = np.zeros(_NUM_WORDS, dtype=np.int64), np.zeros(ctypes.sizeof(Report) // 8, dtype=np.int64)
    words[_REPORT] = report.ctypes.data
    _launch(words, np.zeros(1, dtype=np.int64))
    _wait(words, 0)


def record_event(library: Library, stream: int, event: Number) -> NativeCall:
    """Return the call that records an event on a stream; both are handles."""
    return NativeCall(library.address_of("cuEventRecord"), (event, stream), partial(_fail, "recorded"))


def wait_for_event(library: Library, stream: int, event: Number) -> NativeCall:
    """Return the call that lets a stream wait for an event; both are handles."""
    return NativeCall(library.address_of("cuStreamWaitEvent"), (stream, event, 0), partial(_fail, "waited for"))


def _fail(done: str, result: int) -> None:
    raise LaunchError(f"an event could not be {done}: error {result} of the CUDA driver")
