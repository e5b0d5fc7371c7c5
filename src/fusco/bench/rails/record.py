"""Result of one case of a benchmark of rails."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from fusco.bench.harness.environment import Measurement, versions
from fusco.testbed import Testbed


@dataclass(frozen=True)
class RailsRecord(Measurement):
    """One row of a table."""

    benchmark: str  # its name
    analogue: str  # the figure or table of FuseLink that it is the analogue of
    case: str  # the traffic, in words
    policy: str  # the policy, or the variant of it
    # num_hosts, num_rails: of the testbed; rails are those of each host
    num_hosts: int
    num_rails: int
    bits_per_s: int  # of a rail, headers included
    results: dict[str, float]  # measured values by name, with units
    versions: dict[str, str] = field(default_factory=lambda: versions("pyroute2"), kw_only=True)

    @property
    def title(self) -> str:
        """Title of a table of such records."""
        analogue = "" if self.analogue == "none" else f" (FuseLink, {self.analogue})"
        rails = f"{self.num_rails} rails of {self.bits_per_s / 1e9:g} Gbit/s"
        return f"{self.benchmark}{analogue}: {self.num_hosts} hosts, {rails}"


class CaseResult(NamedTuple):
    """What a benchmark yields for each case: fields of a ``RailsRecord``."""

    case: str
    policy: str
    results: dict[str, float]


def line_rate(bed: Testbed) -> float:
    """Return the GB/s (1e9 bytes) of a rail of a testbed, headers included."""
    return bed.layout.rate / 8e9


def scaled(num_bytes: int, bed: Testbed) -> int:
    """Return bytes that take as long on a testbed's rails as ``num_bytes`` on rails of 2 Gbit/s."""
    return round(num_bytes * bed.layout.rate / 2e9)


def percentile_ms(seconds: list[float], percent: float) -> float:
    """Return a percentile in milliseconds, by linear interpolation.

    >>> percentile_ms([0.001, 0.003, 0.002], 50)
    2.0
    """
    return round(1e3 * float(np.percentile(seconds, percent)), 6)
