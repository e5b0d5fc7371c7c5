"""A worker's row of the board: what it announces to the other workers of the host."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from time import monotonic_ns

from fusco.rails.board import (
    BORROWED,
    CELL_0,
    COMPLETED,
    FIELDS,
    LAST_RX,
    LAST_TX,
    POSTED,
    ROW_FIELDS,
    RX_BYTES,
    RX_CHUNKS,
    TX_BYTES,
    Board,
    NamedRail,
)
from fusco.rails.rail import Rail


class BoardRow:
    """The cells of one worker, one for each rail. Only this worker's process writes them."""

    def __init__(
        self, board: Board, worker: int, direct: int, rails: Sequence[NamedRail | Rail], rest_s: float = 0.0
    ) -> None:
        """Register the worker; raises ``SharedMemoryError`` if the board is full.

        Times of the last activity are set back by ``rest_s`` when nothing is under way any more, so that others need
        not wait for the end of their hold time.
        """
        self.row = board.register(worker, direct, rails)
        self._board, self._fields, self._barrier = board, board.fields, threading.Lock()
        self.pid, self._rest_ns = os.getpid(), int(1e9 * rest_s)
        self._cells = [CELL_0 + self.row * ROW_FIELDS + rail * FIELDS for rail in range(len(rails))]
        self._generation = -1
        self._borrowed: list[memoryview] = []  # for each rail, the borrowed chunks of every worker

    def close(self) -> None:
        """Give the row back."""
        self._release_borrowed()
        self._board.unregister(self.row)

    def announce(self, rail: int) -> None:
        """Say that this worker is about to send over a rail."""
        self._fields[self._cells[rail] + LAST_TX] = monotonic_ns()

    def post(self, rail: int) -> None:
        """Count a chunk that is posted on a rail."""
        cell, fields = self._cells[rail], self._fields
        fields[cell + POSTED] += 1
        fields[cell + LAST_TX] = monotonic_ns()

    def complete(self, rail: int, num_bytes: int) -> None:
        """Count a chunk of ``num_bytes`` that has left the network; 0 bytes if it was lost with its rail."""
        cell, fields = self._cells[rail], self._fields
        fields[cell + COMPLETED] += 1
        fields[cell + TX_BYTES] += num_bytes
        rests = fields[cell + POSTED] == fields[cell + COMPLETED]
        fields[cell + LAST_TX] = monotonic_ns() - self._rest_ns * rests

    def receiving(self, rail: int, *, rests: bool = False) -> None:
        """Say that bytes for this worker have arrived by a rail; it ``rests`` if no message is incomplete."""
        self._fields[self._cells[rail] + LAST_RX] = monotonic_ns() - self._rest_ns * rests

    def received(self, rail: int, num_bytes: int) -> None:
        """Count a chunk that has arrived by a rail."""
        cell, fields = self._cells[rail], self._fields
        fields[cell + RX_CHUNKS] += 1
        fields[cell + RX_BYTES] += num_bytes

    def borrowed(self, rail: int) -> int:
        """Return the borrowed chunks of all workers that are outstanding on a rail."""
        if self._board.generation != self._generation:
            self._follow_board()
        return sum(self._borrowed[rail])

    def borrowed_by_this(self, rail: int) -> int:
        """Return the borrowed chunks of this worker that are outstanding on a rail."""
        return self._fields[self._cells[rail] + BORROWED]

    def take(self, rail: int, bound: int | None) -> bool:
        """Count one more borrowed chunk on a rail, unless all workers together then have more than ``bound``.

        Workers that take the last ones at the same time may all be refused, and try again; never do more than
        ``bound`` succeed.
        """
        cell = self._cells[rail] + BORROWED
        self._fields[cell] += 1
        with self._barrier:  # its atomic instruction: the count is visible before those of the others are read
            pass
        if bound is not None and self.borrowed(rail) > bound:
            self._fields[cell] -= 1
            return False
        return True

    def give_back(self, rail: int) -> None:
        """Count one borrowed chunk less on a rail."""
        self._fields[self._cells[rail] + BORROWED] -= 1

    def _follow_board(self) -> None:
        """Look where the workers are that are registered now."""
        self._release_borrowed()
        self._generation = self._board.generation
        end = CELL_0 + (1 + max(each.row for each in self._board.workers())) * ROW_FIELDS
        starts = [CELL_0 + rail * FIELDS + BORROWED for rail in range(len(self._cells))]
        self._borrowed = [self._fields[start:end:ROW_FIELDS] for start in starts]

    def _release_borrowed(self) -> None:
        for view in self._borrowed:
            view.release()
        self._borrowed = []
