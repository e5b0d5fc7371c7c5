"""Kills and stops of ranks, counted by the communicators that they struck, and how soon the others were right."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from statistics import median


@dataclass(frozen=True, order=True)
class Strike:
    """A signal to a rank: ``"SIGKILL"`` or ``"SIGSTOP"``, and what the communicator had."""

    signals: str
    ranks: int
    nodes: int
    rails: str


@dataclass(frozen=True)
class Strikes:
    """Strikes so far.

    Attributes:
        counts: of equal ones.
        late_s: seconds from the last of some strikes until all others were right; if some were stops, beyond the limit
            of each. By name of the signal.
        slow: times that a rank has named others that were slow, on a machine that has too much to do, by rank.
    """

    counts: Counter[Strike] = field(default_factory=Counter)
    late_s: dict[str, list[float]] = field(default_factory=lambda: {"SIGKILL": [], "SIGSTOP": []})
    slow: Counter[int] = field(default_factory=Counter)

    def __str__(self) -> str:
        parts = [f"{self.counts.total()} strikes"]
        for name in ("signals", "ranks", "nodes", "rails"):
            found = Counter[str]()
            for strike, num in sorted(self.counts.items()):
                found[str(getattr(strike, name))] += num
            parts.append(f"{name} " + ", ".join(f"{value}: {num}" for value, num in found.items()))
        for name, late_s in self.late_s.items():
            if late_s:
                what = f"right after {name}" if name == "SIGKILL" else f"right after the limit of {name}"
                parts.append(f"{what}: median {median(late_s):.2f} s, at most {max(late_s):.2f} s")
        if self.slow.total():
            parts.append(f"{self.slow.total()} errors named slow ranks instead, on a machine that had too much to do")
        return "; ".join(parts)
