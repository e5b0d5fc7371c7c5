"""Compile the scheduler before anybody waits for it."""

from __future__ import annotations

import numpy as np

from fusco.core.topology import Topology
from fusco.schedule.decomposition import decompose
from fusco.schedule.schedule import make_schedule


def warm_up() -> None:
    """Compile all that schedules, or load it from the disk cache (seconds once, then milliseconds)."""
    decompose(np.ones((2, 2), np.int64), mode="few")
    make_schedule(np.ones((4, 4), np.int64), Topology.of_equal_nodes(4, 2), mode="exact")
