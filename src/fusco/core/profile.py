"""Profile of a collective: seconds of each part, bytes by kind."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TypeAlias

from fusco.core.announcements import LOGGER
from fusco.core.timeline import HostTimeline


class _Section:
    """Context manager that adds its time to a field. A class, as a generator takes a microsecond longer."""

    __slots__ = ("_field", "_profile", "_start")

    def __init__(self, profile: CallProfile, field: str) -> None:
        self._profile, self._field = profile, field

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        spent = time.perf_counter() - self._start
        setattr(self._profile, self._field, getattr(self._profile, self._field) + spent)


class _RecordedSection(_Section):
    """The same, and a span of it."""

    __slots__ = ("_timeline",)

    def __init__(self, profile: CallProfile, field: str, timeline: HostTimeline) -> None:
        super().__init__(profile, field)
        self._timeline = timeline

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        self._timeline.add("parts of calls", self._field.removesuffix("_s"), self._start, time.perf_counter())


@dataclass
class CallProfile:
    """Times and bytes of one collective on this rank.

    Times are in seconds and include waits. On CUDA they are the host's, for launching.

    Attributes:
        operation: for example ``"dispatch #3"``.
        planning_s: agreeing with all ranks, in every collective; in a dispatch also exchanging routing and making the
            plan, in an all-to-all making the schedule. Rows of a small dispatch between CPUs, and sums of a small
            combine, travel meanwhile.
        staging_s: copying rows into peer-visible memory, in their order, or partial sums of a small combine; on CUDA
            zero, since rows are pushed at once.
        wire_s: moving rows to their final places.
        rearranging_s: passes over memory that only rearrange rows. This engine has none; the field exists so that one
            that is added must be reported.
        internode_row_bytes: rows sent to other nodes.
        internode_empty_bytes: of those of an exactly sized dispatch, rows without a token (``MessageRows``); in a
            combine, rows of this rank that return without a sum.
        internode_metadata_bytes: routing and records sent to other nodes.
        intranode_row_bytes: rows, or partial sums, read from other ranks of the node; on CUDA only those of
            ``all_to_all`` and of ``shuffle`` with lanes, as the others are known on the device only.
        lane_row_bytes: rows of other ranks of the node that this rank read to send them to other nodes, or sums that it
            read from the ranks that carried them.
        num_sms: on CUDA, maximum number of SMs that moved its rows at a time, including staging. Kernels
            that pack slices and NCCL kernels do not count.
    """

    operation: str = ""
    planning_s: float = 0.0
    staging_s: float = 0.0
    wire_s: float = 0.0
    rearranging_s: float = 0.0
    internode_row_bytes: int = 0
    internode_empty_bytes: int = 0
    internode_metadata_bytes: int = 0
    intranode_row_bytes: int = 0
    lane_row_bytes: int = 0
    num_sms: int = 0

    def spend(self, kind: str) -> _Section:
        """Return a context manager that adds the time of its ``with`` block to the field ``{kind}_s``."""
        return _Section(self, f"{kind}_s")

    def count_sms(self, num_sms: int) -> None:
        """Count SMs in use at the same time: ``num_sms`` becomes the maximum."""
        self.num_sms = max(self.num_sms, num_sms)


ProfileHook: TypeAlias = Callable[[CallProfile], object]


def report(profile: CallProfile, hooks: Sequence[ProfileHook]) -> None:
    """Call hooks; one that raises is logged, and removed if it can be."""
    for hook in tuple(hooks):
        try:
            hook(replace(profile))
        except Exception:  # noqa: BLE001  it must not end a call that other ranks have completed
            LOGGER.exception("a profile hook raised in %s, and is called no more", profile.operation)
            if isinstance(hooks, list):
                hooks.remove(hook)


_PARTS = tuple(each.name.removesuffix("_s") for each in fields(CallProfile) if each.name.endswith("_s"))
_KINDS = tuple(each.name.removesuffix("_bytes") for each in fields(CallProfile) if each.name.endswith("_bytes"))


class CallCounters:
    """A profile hook that adds up calls, seconds and bytes, by verb, since it was made; for metrics and dashboards.

    All numbers only grow, as counters of a monitoring system do. Other threads may read them at any time.

    >>> counters = CallCounters()
    >>> counters(CallProfile("dispatch #1", planning_s=0.5, internode_row_bytes=64))
    >>> counters(CallProfile("dispatch #2", planning_s=0.25, internode_row_bytes=64))
    >>> totals = counters.by_verb["dispatch"]
    >>> totals.calls, totals.seconds, totals.bytes["internode_row"]
    (2, 0.75, 128)
    """

    def __init__(self) -> None:
        self._by_verb: dict[str, CallTotals] = {}

    def __call__(self, profile: CallProfile) -> None:
        """Add a call."""
        verb = profile.operation.partition(" #")[0]
        before = self._by_verb.get(verb) or CallTotals()
        self._by_verb[verb] = CallTotals(
            calls=before.calls + 1,
            seconds_by_part={
                name: value + getattr(profile, f"{name}_s") for name, value in before.seconds_by_part.items()
            },
            bytes={name: value + getattr(profile, f"{name}_bytes") for name, value in before.bytes.items()},
        )

    @property
    def by_verb(self) -> dict[str, CallTotals]:
        """The totals of each verb that was called, such as ``"dispatch"`` and ``"combine"``."""
        return dict(self._by_verb)


@dataclass(frozen=True)
class CallTotals:
    """Sums over the calls of a verb.

    Attributes:
        calls: number of collectives.
        seconds_by_part: of ``planning``, ``staging``, ``wire`` and ``rearranging``; see ``CallProfile``.
        bytes: by kind, such as ``internode_row`` and ``intranode_row``; see ``CallProfile``.
    """

    calls: int = 0
    seconds_by_part: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_PARTS, 0.0))
    bytes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_KINDS, 0))

    @property
    def seconds(self) -> float:
        """Seconds of all parts together."""
        return sum(self.seconds_by_part.values())


class RecordedProfile(CallProfile):
    """A profile whose parts are spans of a timeline, too."""

    timeline: HostTimeline

    def spend(self, kind: str) -> _Section:
        """Return a context manager as ``CallProfile`` does."""
        return _RecordedSection(self, f"{kind}_s", self.timeline)


@dataclass
class Call:
    """A collective under way."""

    sequence_number: int  # of the latest exchange of records, the same on all ranks; most collectives have one
    profile: CallProfile  # counts times, bytes and SMs
    _exchange: Callable[[Mapping[str, str]], int] | None = None  # compares, and returns the next sequence number

    def compare(self, fields: Mapping[str, str]) -> None:
        """Compare more fields among all ranks, in another exchange of records; ``MismatchError`` if they differ."""
        assert self._exchange, "nothing to compare with"
        self.sequence_number = self._exchange(fields)
