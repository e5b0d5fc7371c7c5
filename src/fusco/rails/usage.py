"""Use of each NIC by each worker, read from the board without registering on it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from fusco.rails.board import BORROWED, COMPLETED, POSTED, RX_BYTES, TX_BYTES, Board


@dataclass(frozen=True)
class RailUse:
    """A worker's use of a rail between two looks at the board."""

    rail: int  # its index
    interface: str  # its name
    bits_per_s: int  # its speed; 0 if unknown
    worker: int  # the worker
    pid: int  # its process
    is_owner: bool  # whether the rail is its direct one
    # sent_mb_per_s, received_mb_per_s: MB/s (1e6 bytes)
    sent_mb_per_s: float
    received_mb_per_s: float
    outstanding: int  # chunks sent and not acknowledged
    borrowed: int  # those of them that are borrowed


class UsageReader:
    """Reads the board repeatedly; rates are those since the last time."""

    def __init__(self, path: Path | None = None) -> None:
        """Open a board, by default that of this user and network namespace; ``SharedMemoryError`` if that fails."""
        self._board = Board(path)
        self._last: dict[tuple[int, int, int], tuple[int, int]] = {}  # (pid, row, rail) to bytes sent and received
        self._last_s = time.monotonic()

    def read(self) -> list[RailUse]:
        """Return every worker's use of every rail that it owns or has used, by rail and worker."""
        if self._board.follow():
            self._last = {}
        self._board.reset_dead()
        now = time.monotonic()
        seconds, last, self._last, self._last_s = max(now - self._last_s, 1e-9), self._last, {}, now
        uses = []
        for each in self._board.workers():
            for rail, (interface, bits_per_s) in enumerate(self._board.rails()):
                cell, key = self._board.cell(each.row, rail), (each.pid, each.row, rail)
                sent, received = self._last[key] = cell[TX_BYTES], cell[RX_BYTES]
                is_owner = bool(each.direct >> rail & 1)
                if not (is_owner or sent or received or cell[BORROWED]):
                    continue
                before = last.get(key, (sent, received))
                rates = ((sent - before[0]) / seconds / 1e6, (received - before[1]) / seconds / 1e6)
                counts = (cell[POSTED] - cell[COMPLETED], cell[BORROWED])
                uses.append(RailUse(rail, interface, bits_per_s, each.worker, each.pid, is_owner, *rates, *counts))
        return sorted(uses, key=lambda use: (use.rail, not use.is_owner, use.worker, use.pid))

    def close(self) -> None:
        """Close the board."""
        self._board.close()
