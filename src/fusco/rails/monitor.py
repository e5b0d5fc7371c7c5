"""Monitors: which rails of this host their owners do not use now (FuseLink, section 4.3.1)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import monotonic_ns

from fusco.rails.board import CELL_0, COMPLETED, FIELDS, LAST_RX, LAST_TX, ROW_FIELDS, RX_CHUNKS, Board

_CHUNKS_TO_BUSY = 2  # an owner that uses its rail completes a chunk within the time of two


class Monitor:
    """Tells idle rails from busy ones, as masks. Rails without an owner on the board are idle."""

    _fields_watched: tuple[int, int]  # of a cell, for sending and for receiving

    def __init__(self, board: Board, row: int, num_rails: int, clock: Callable[[], int]) -> None:
        """Monitor the rails for the worker of a row; ``clock`` in nanoseconds, as the board's."""
        self._board, self._row, self._fields, self._clock = board, row, board.fields, clock
        self._num_rails, self._all, self._generation = num_rails, (1 << num_rails) - 1, -1
        self._cells: list[tuple[int, int, int]] = []  # of other owners: (bit of the rail, index of the cell, rail)

    def idle_to_send(self) -> int:
        """Return the rails that no other owner sends over."""
        return self._idle(self._fields_watched[0])

    def idle_to_receive(self) -> int:
        """Return the rails that no other owner receives over."""
        return self._idle(self._fields_watched[1])

    def _idle(self, field: int) -> int:
        raise NotImplementedError

    def _owned_cells(self) -> list[tuple[int, int, int]]:
        """Return ``_cells``, looked up anew when the board's generation has changed."""
        if (generation := self._board.generation) != self._generation:
            self._generation = generation
            others = [each for each in self._board.workers() if each.row != self._row]
            self._cells = [
                (1 << rail, CELL_0 + each.row * ROW_FIELDS + rail * FIELDS, rail)
                for rail in range(self._num_rails)
                for each in others
                if each.direct >> rail & 1
            ]
        return self._cells


class ActivityMonitor(Monitor):
    """A rail is busy for ``hold_s`` after its owner last posted, completed or received anything on it.

    On slow rails it is busy for the time of two chunks, which is longer: an owner that uses its rail all the time has
    activity as often as that.
    """

    _fields_watched = (LAST_TX, LAST_RX)

    def __init__(
        self,
        board: Board,
        row: int,
        bits_per_s: Sequence[int],
        hold_s: float,
        chunk_bytes: int,
        clock: Callable[[], int] = monotonic_ns,
    ) -> None:
        """Monitor the rails of speeds ``bits_per_s`` (0: unknown)."""
        super().__init__(board, row, len(bits_per_s), clock)
        self._hold_ns = [
            int(1e9 * max(hold_s, _CHUNKS_TO_BUSY * 8 * chunk_bytes / speed if speed else 0.0)) for speed in bits_per_s
        ]

    def _idle(self, field: int) -> int:
        cells = self._owned_cells()
        idle, fields, hold_ns, now = self._all, self._fields, self._hold_ns, self._clock()
        for bit, cell, rail in cells:
            if now - fields[cell + field] < hold_ns[rail]:
                idle &= ~bit
        return idle


class CompletionMonitor(Monitor):
    """A rail is busy if its owner has completed anything on it since the last poll, as FuseLink describes.

    Polls are at least ``period_s`` apart: between, the last answer holds. An owner's first chunk goes unnoticed until
    it completes.
    """

    _fields_watched = (COMPLETED, RX_CHUNKS)

    def __init__(
        self, board: Board, row: int, num_rails: int, period_s: float, clock: Callable[[], int] = monotonic_ns
    ) -> None:
        super().__init__(board, row, num_rails, clock)
        self._period_ns, self._next_ns = int(1e9 * period_s), dict.fromkeys(self._fields_watched, 0)
        self._last = dict.fromkeys(self._fields_watched, self._all)
        self._seen: dict[int, int] = {}  # by index of the field

    def _idle(self, field: int) -> int:
        now = self._clock()
        if now < self._next_ns[field]:
            return self._last[field]
        self._next_ns[field] = now + self._period_ns
        idle = self._all
        for bit, cell, _ in self._owned_cells():
            count = self._fields[cell + field]
            if self._seen.get(cell + field, 0) != count:
                self._seen[cell + field] = count
                idle &= ~bit
        self._last[field] = idle
        return idle
