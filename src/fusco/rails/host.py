"""Parts that the channels of an endpoint share."""

from __future__ import annotations

from dataclasses import dataclass

from fusco.rails.board_row import BoardRow
from fusco.rails.limits import Limits
from fusco.rails.loop import Loop
from fusco.rails.monitor import Monitor
from fusco.rails.rail import Rail
from fusco.rails.schedule import Policy


@dataclass(frozen=True)
class Host:
    """Worker, rails and parts that all channels of an endpoint share."""

    worker: int  # this worker
    rails: tuple[Rail, ...]  # the rails of this host
    direct: int  # mask of this worker's
    limits: Limits  # bounds
    policy: Policy  # the use of rails
    row: BoardRow  # this worker's row of the board
    monitor: Monitor  # which rails are idle
    timeout_s: float  # the limit of a wait
    loop: Loop  # the endpoint's thread

    def defers(self, rail: int) -> bool:
        """Return whether this worker's traffic on a rail asks for a lower network priority."""
        return self.policy.defers and not self.direct >> rail & 1

    def least_late_s(self, rail: int) -> float:
        """Return the seconds before which no chunk on a rail is late: twice those of all that may be on it."""
        bits = 8 * self.limits.chunk_bytes * self.limits.borrowed_per_rail
        return max(self.limits.hold_s, 2 * bits / (self.rails[rail].bits_per_s or bits * 1e9))
