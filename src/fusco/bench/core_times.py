"""Time of this machine's cores: that of this process, and of all."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_IDLE = slice(3, 5)  # fields of /proc/stat, proc(5): idle, and waiting for a disk
_NUM_FIELDS = 8  # those after steal are counted in earlier ones


@dataclass(frozen=True)
class CoreTimes:
    """Core-seconds of this process, of all processes and the kernel, and of all cores, busy or idle.

    Those of the machine have steps of 10 ms.
    """

    process_s: float = 0.0
    busy_s: float = 0.0
    all_s: float = 0.0

    @classmethod
    def now(cls) -> CoreTimes:
        """Return the times since this process, and this machine, started."""
        line = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0]
        ticks = list(map(int, line.split()[1 : 1 + _NUM_FIELDS]))
        per_second = os.sysconf("SC_CLK_TCK")
        return cls(time.process_time(), (sum(ticks) - sum(ticks[_IDLE])) / per_second, sum(ticks) / per_second)

    def since(self, start: CoreTimes) -> CoreTimes:
        """Return what has passed since ``start``."""
        return CoreTimes(self.process_s - start.process_s, self.busy_s - start.busy_s, self.all_s - start.all_s)


def others_share(of_ranks: Sequence[Sequence[CoreTimes]]) -> float:
    """Return the share of the cores' time that was spent on other processes than the ranks.

    ``of_ranks`` are, by rank, the times of the same calls; all ranks are on this machine.

    >>> others_share([[CoreTimes(0.2, 0.9, 1.0)], [CoreTimes(0.3, 0.9, 1.0)]])
    0.4
    """
    process_s = sum(times.process_s for rank in of_ranks for times in rank)
    busy_s, all_s = (sum(getattr(times, name) for times in of_ranks[0]) for name in ("busy_s", "all_s"))
    return max(0.0, round((busy_s - process_s) / all_s, 3)) if all_s else 0.0
