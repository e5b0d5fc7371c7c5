"""Monitors: which rails of this host their owners do not use now (FuseLink, section 4.3.1)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import monotonic_ns
from typing import Protocol

from fusco.rails.board import CELL_0, COMPLETED, FIELDS, LAST_RX, LAST_TX, ROW_FIELDS, RX_CHUNKS, Board

_CHUNKS_TO_BUSY = 2  # an owner that uses its rail completes a chunk within the time of two


class Monitor(Protocol):
    """Tells idle rails from busy ones, as masks. Rails without an owner on the board are idle."""

    def idle_to_send(self) -> int:
        """Return the rails that no other owner sends over."""

    def idle_to_receive(self) -> int:
        """Return the rails that no other owner receives over."""


class _Owners:
    """For each rail, the cells of the workers that own it, other than this one; follows the board's generation."""

    def __init__(self, board: Board, row: int, num_rails: int) -> None:
        self._board, self._row, self._num_rails = board, row, num_rails
        self._generation = -1
        self.cells: list[tuple[int, int, int]] = []  # (bit of the rail, index of the cell, rail)

    def refresh(self) -> None:
        generation = self._board.generation
        if generation != self._generation:
            self._generation = generation
            others = [each for each in self._board.workers() if each.row != self._row]
            self.cells = [
                (1 << rail, CELL_0 + each.row * ROW_FIELDS + rail * FIELDS, rail)
                for rail in range(self._num_rails)
                for each in others
                if each.direct >> rail & 1
            ]


class ActivityMonitor:
    """A rail is busy for ``hold_s`` after its owner last posted, completed or received anything on it.

    On slow rails it is busy for the time of two chunks, which is longer: an owner that uses its rail all the time has
    activity as often as that.
    """

    def __init__(
        self,
        board: Board,
        row: int,
        bits_per_s: Sequence[int],
        hold_s: float,
        chunk_bytes: int,
        clock: Callable[[], int] = monotonic_ns,
    ) -> None:
        """Monitor the rails of speeds ``bits_per_s`` (0: unknown) for the worker of a row; ``clock`` as the board's."""
        self._fields, self._clock = board.fields, clock
        self._owners, self._all = _Owners(board, row, len(bits_per_s)), (1 << len(bits_per_s)) - 1
        self._hold_ns = [
            int(1e9 * max(hold_s, _CHUNKS_TO_BUSY * 8 * chunk_bytes / speed if speed else 0.0)) for speed in bits_per_s
        ]

    def idle_to_send(self) -> int:
        """Return the rails that no other owner sends over."""
        return self._idle(LAST_TX)

    def idle_to_receive(self) -> int:
        """Return the rails that no other owner receives over."""
        return self._idle(LAST_RX)

    def _idle(self, field: int) -> int:
        self._owners.refresh()
        idle, fields, hold_ns, now = self._all, self._fields, self._hold_ns, self._clock()
        for bit, cell, rail in self._owners.cells:
            if now - fields[cell + field] < hold_ns[rail]:
                idle &= ~bit
        return idle


class CompletionMonitor:
    """A rail is busy if its owner has completed anything on it since the last poll, as FuseLink describes.

    Polls are at least ``period_s`` apart: between, the last answer holds. An owner's first chunk goes unnoticed until
    it completes.
    """

    def __init__(
        self, board: Board, row: int, num_rails: int, period_s: float, clock: Callable[[], int] = monotonic_ns
    ) -> None:
        """Monitor the rails for the worker of a row; ``clock`` in nanoseconds."""
        self._fields, self._clock, self._period_ns = board.fields, clock, int(1e9 * period_s)
        self._owners, self._all = _Owners(board, row, num_rails), (1 << num_rails) - 1
        self._next_ns = {COMPLETED: 0, RX_CHUNKS: 0}
        self._idle = {COMPLETED: self._all, RX_CHUNKS: self._all}
        self._seen: dict[int, int] = {}  # by index of the field

    def idle_to_send(self) -> int:
        """Return the rails that no other owner sends over."""
        return self._poll(COMPLETED)

    def idle_to_receive(self) -> int:
        """Return the rails that no other owner receives over."""
        return self._poll(RX_CHUNKS)

    def _poll(self, field: int) -> int:
        now = self._clock()
        if now < self._next_ns[field]:
            return self._idle[field]
        self._next_ns[field] = now + self._period_ns
        self._owners.refresh()
        idle = self._all
        for bit, cell, _ in self._owners.cells:
            count = self._fields[cell + field]
            if self._seen.get(cell + field, 0) != count:
                self._seen[cell + field] = count
                idle &= ~bit
        self._idle[field] = idle
        return idle
