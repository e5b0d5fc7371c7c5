"""The board: who uses which NIC of this host, in shared memory that all jobs of a user share.

``engine/board.h`` describes the file and who may write what; the engine opens, locks and changes it.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fusco.core.files import board_pattern
from fusco.rails.binding import NamedRail as _NamedRail, ask, functions
from fusco.rails.rail import MAX_RAILS, Rail

MAX_WORKERS = 64
FIELDS = 8  # 64-bit fields of a cell
POSTED, COMPLETED, LAST_TX, LAST_RX, TX_BYTES, RX_BYTES, RX_CHUNKS, BORROWED = range(FIELDS)
# Indices of 64-bit numbers: the generation, the first rail, worker and cell.
_GENERATION, _RAILS, _WORKERS, _CELLS = 24 // 8, 64 // 8, 1088 // 8, 8192 // 8
_NUM_FIELDS = _CELLS + MAX_WORKERS * MAX_RAILS * FIELDS
_LOCK_S = 10.0  # changes take microseconds


@dataclass(frozen=True)
class WorkerRow:
    """A registered worker: its row, process, number, and mask of direct rails."""

    row: int
    pid: int
    worker: int
    direct: int


@dataclass(frozen=True)
class NamedRail:
    """A rail as the board names it."""

    interface: str  # its name, of at most 15 bytes
    bits_per_s: int  # its speed; 0 if unknown


class _Board(ctypes.Structure):
    """``struct board``."""

    _fields_ = (
        *(("fields", ctypes.c_void_p), ("fd", ctypes.c_int), ("row", ctypes.c_int), ("rest_ns", ctypes.c_int64)),
        *(("limit_s", ctypes.c_double), ("path", ctypes.c_char * 1024)),
    )


class Board:
    """The board, mapped by the engine. The last user removes the file.

    Whatever changes it waits for its lock, then raises ``SharedMemoryError``.
    """

    def __init__(self, path: Path | None = None, limit_s: float = _LOCK_S) -> None:
        """Open the board, or make it; ``SharedMemoryError`` if that fails or another user owns the file.

        A path may be a pattern ``NAME.*``: of its files, the first that is this user's is taken, or else a new one.
        """
        self.handle: int | None = ask(
            "board_open", os.fsencode(path or board_pattern("rails", os.stat("/proc/self/ns/net").st_ino)), limit_s
        )
        self._state = _Board.from_address(self.handle)

    @property
    def path(self) -> Path:
        """Its file."""
        return Path(os.fsdecode(self._state.path))

    @property
    def fields(self) -> ctypes.Array[ctypes.c_uint64]:
        """Its 64-bit numbers."""
        return (ctypes.c_uint64 * _NUM_FIELDS).from_address(self._state.fields)

    @property
    def fd(self) -> int:
        """Its descriptor, of which a lock is held while rows change."""
        return int(self._state.fd)

    @property
    def row(self) -> int:
        """The row that was registered; -1 if none."""
        return int(self._state.row)

    def follow(self) -> bool:
        """Open the board anew if its last user has removed the file, as later users have another; return if it has.

        Raises ``SharedMemoryError`` if that fails; the board is closed then.
        """
        fields, inode = self._state.fields, os.fstat(self._state.fd).st_nlink
        ask("board_follow", self.handle)
        return not inode or fields != self._state.fields

    def close(self) -> None:
        """Unmap the board; without registered workers that live, remove its file."""
        handle, self.handle = self.handle, None
        if handle:
            functions()["board_close"](handle)

    def register(self, worker: int, direct: int, rails: Sequence[NamedRail | Rail], rest_s: float = 0.0) -> int:
        """Take a free row for this process and return it; ``SharedMemoryError`` if all are taken, or that fails.

        Times of the last activity are set back by ``rest_s`` when nothing is under way any more, so that others need
        not wait for the end of their hold time.
        """
        named = (_NamedRail * len(rails))(*(_NamedRail(rail.interface.encode(), rail.bits_per_s) for rail in rails))
        ask("board_register", self.handle, worker, direct, named, len(rails), rest_s)
        return self.row

    def leave(self) -> None:
        """Give the row back."""
        if self.handle:
            functions()["board_leave"](self.handle)

    def announce(self, rail: int) -> None:
        """Say that this worker is about to send over a rail."""
        self.fields[_CELLS + (self.row * MAX_RAILS + rail) * FIELDS + LAST_TX] = time.monotonic_ns()

    def reset_dead(self) -> None:
        """Free the rows of processes that have ended, unless another process is changing the board."""
        functions()["board_reset_dead"](self.handle)

    @property
    def generation(self) -> int:
        """A number that changes whenever a worker registers or leaves."""
        return self.fields[_GENERATION]

    def workers(self) -> list[WorkerRow]:
        """Return the registered workers, by row."""
        fields, firsts = self.fields, (_WORKERS + row * FIELDS for row in range(MAX_WORKERS))
        rows = ((row, fields[first : first + 4]) for row, first in enumerate(firsts))
        return [WorkerRow(row, pid, worker, direct) for row, (pid, _, worker, direct) in rows if pid]

    def rails(self) -> list[tuple[str, int]]:
        """Return interface and speed in bit/s of each rail, as its last user registered them."""
        named = (_NamedRail.from_address(self._state.fields + 8 * (_RAILS + i * FIELDS)) for i in range(MAX_RAILS))
        return [(rail.interface.decode(), rail.bits_per_s) for rail in named if rail.interface]

    def cell(self, row: int, rail: int) -> list[int]:
        """Return a copy of the fields of a worker's cell."""
        first = _CELLS + (row * MAX_RAILS + rail) * FIELDS
        return self.fields[first : first + FIELDS]


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
