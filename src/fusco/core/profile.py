"""Where the time of a collective went, and which bytes it moved: the numbers that are reported apart."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class CallProfile:
    """One collective as this rank saw it; times in seconds, waiting included; on CUDA the host's, for launching.

    Attributes:
        operation: for example ``"dispatch #3"``.
        planning_s: agreeing with all ranks, in every collective; in a dispatch also exchanging routing and making the
            plan, in an all-to-all making the schedule.
        staging_s: copying rows into peer-visible memory, in the order they have.
        wire_s: moving rows to their final places.
        rearranging_s: passes over memory that only rearrange rows. This engine has none; the field is there so that
            whoever adds one must own up to it.
        internode_row_bytes: rows sent to other nodes.
        internode_metadata_bytes: routing and records sent to other nodes.
        intranode_row_bytes: rows, or partial sums, read from other ranks of the node; on CUDA, where the device alone
            knows most of them, only those of ``all_to_all``.
        num_sms: on CUDA, multiprocessors that moving its rows took at once, staging included. What packs slices and
            NCCL's kernels are not counted.

    """

    operation: str = ""
    planning_s: float = 0.0
    staging_s: float = 0.0
    wire_s: float = 0.0
    rearranging_s: float = 0.0
    internode_row_bytes: int = 0
    internode_metadata_bytes: int = 0
    intranode_row_bytes: int = 0
    num_sms: int = 0
    _started: float = field(default_factory=time.perf_counter, repr=False)

    @contextmanager
    def spend(self, kind: str) -> Iterator[None]:
        """Add the time of the ``with`` block to the field ``{kind}_s``."""
        start = time.perf_counter()
        try:
            yield
        finally:
            name = f"{kind}_s"
            setattr(self, name, getattr(self, name) + time.perf_counter() - start)

    def count_sms(self, num_sms: int) -> None:
        """Count multiprocessors that are at work at once."""
        self.num_sms = max(self.num_sms, num_sms)


@dataclass
class Call:
    """One collective under way.

    Attributes:
        sequence_number: of the latest exchange of records, which is one a collective, as a rule; the same on all ranks.
        profile: where times, bytes and multiprocessors are counted.

    """

    sequence_number: int
    profile: CallProfile
    _exchange: Callable[[Mapping[str, str]], int] | None = None  # compares, and returns the next sequence number

    def compare(self, fields: Mapping[str, str]) -> None:
        """Compare more fields among all ranks, in another exchange of records; ``MismatchError`` if they differ."""
        assert self._exchange, "nothing to compare with"
        self.sequence_number = self._exchange(fields)
