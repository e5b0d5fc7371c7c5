"""Times between marks, on a device or the host."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch


class Stopwatch:
    """Marks moments: by events on the current CUDA stream with ``"cuda"``, by the host's clock with ``"cpu"``."""

    def __init__(self, device_type: str) -> None:
        self.is_cuda = device_type == "cuda"

    def mark(self) -> Any:
        """Mark this moment; on CUDA, when the stream reaches it."""
        if not self.is_cuda:
            return time.perf_counter()
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def elapsed_ms(self, start: Any, end: Any) -> float:
        """Return the milliseconds between two marks; on CUDA the device must have reached both."""
        return float(start.elapsed_time(end)) if self.is_cuda else float(end - start) * 1e3


class SectionTimer:
    """Adds up the times between marks, by section, while it is on; waiting for ranks and the host is included."""

    is_on = True

    def __init__(self, device_type: str) -> None:
        self._stopwatch = Stopwatch(device_type)
        self._marks: dict[str, list[Any]] = {}

    def mark(self, section: str) -> None:
        """Begin a section, or end the one that has begun."""
        if self.is_on:
            self._marks.setdefault(section, []).append(self._stopwatch.mark())

    @contextmanager
    def timed(self, section: str) -> Iterator[None]:
        """Mark a section around the block."""
        self.mark(section)
        yield
        self.mark(section)

    def take_s(self, sections: Sequence[str]) -> dict[str, float]:
        """Return the seconds of every section since the last call; the device must have reached all marks."""
        times = {}
        for section in sections:
            marks = self._marks.pop(section, [])
            assert len(marks) % 2 == 0, f"{section} began and did not end"
            pairs = zip(marks[::2], marks[1::2], strict=True)
            times[section] = sum(self._stopwatch.elapsed_ms(start, end) for start, end in pairs) / 1e3
        return times
