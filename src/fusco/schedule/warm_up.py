"""Compile the scheduler before anybody waits for it."""

from __future__ import annotations

import numpy as np

from fusco.schedule.decomposition import decompose


def warm_up() -> None:
    """Compile both decompositions, or load them from the disk cache (seconds once, then milliseconds)."""
    node_bytes = np.ones((2, 2), np.int64)
    decompose(node_bytes, mode="exact")
    decompose(node_bytes, mode="few")
