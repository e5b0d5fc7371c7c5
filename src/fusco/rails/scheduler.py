"""Scheduler of one channel, which counts borrowed chunks on the board, and the credits for that of the peer."""

from __future__ import annotations

from time import monotonic_ns

from fusco.rails.board_row import BoardRow
from fusco.rails.host import Host
from fusco.rails.limits import Limits
from fusco.rails.monitor import Monitor
from fusco.rails.schedule import WAIT, Policy, View, rails_of
from fusco.rails.wire import EPOCHS, Record, is_newer


class Batch:
    """Chunks that are scheduled with the same knowledge (FuseLink, section 4.4); it ends by number or by age."""

    def __init__(self, limits: Limits, policy: Policy) -> None:
        self._size, self._max_ns = limits.batch, int(1e9 * limits.refresh_s) if policy.refreshes else 0
        self._left, self._end_ns = 0, 0

    def is_over(self) -> bool:
        """Return whether knowledge must be renewed."""
        return self._left <= 0 or (self._max_ns > 0 and monotonic_ns() >= self._end_ns)

    def begin(self) -> None:
        """Begin the next batch."""
        self._left = self._size
        if self._max_ns:
            self._end_ns = monotonic_ns() + self._max_ns

    def count(self) -> None:
        """Count a chunk."""
        self._left -= 1


class Scheduler:
    """Chooses a rail for each chunk of a channel."""

    def __init__(
        self, row: BoardRow, monitor: Monitor, policy: Policy, limits: Limits, *, direct: int, num_rails: int
    ) -> None:
        self._row, self._monitor, self._policy, self._limits = row, monitor, policy, limits
        self.view = View(direct, 0, 0, [0] * num_rails, [0] * num_rails)
        self._bound = limits.borrowed_per_rail if policy.bound == "rail" else None
        self._peer_idle, self._epoch = (1 << num_rails) - 1, 0
        self._batch = Batch(limits, policy)

    def credit(self, idle: int, epoch: int) -> None:
        """Take the receiver's idle rails; credits of several rails may come out of order, the newest counts."""
        if is_newer(epoch, self._epoch):
            self._epoch, self._peer_idle = epoch, idle

    def choose(self) -> int:
        """Return the rail for the next chunk and count the chunk on it; ``WAIT`` if it must wait."""
        if self._batch.is_over():
            self._refresh()
        view = self.view
        while (rail := self._policy.choose(view, self._limits)) != WAIT:
            if view.direct >> rail & 1:
                break
            if self._row.take(rail, self._bound):
                view.borrowed[rail] += 1
                break
            view.borrowed[rail] = self._limits.borrowed_per_rail  # another worker was quicker
        else:
            return WAIT
        view.outstanding[rail] += 1
        self._batch.count()
        self._row.post(rail)
        return rail

    def busy(self) -> int:
        """Return the indirect rails that their owners use; none while no direct rail works."""
        if self._batch.is_over():
            self._refresh()
        view = self.view
        return ~(view.idle | view.direct) if view.direct & view.usable else 0

    def completed(self, rail: int, num_bytes: int) -> None:
        """Note that a chunk has left the network; 0 bytes if it was lost with its rail."""
        view = self.view
        view.outstanding[rail] -= 1
        if not view.direct >> rail & 1:
            view.borrowed[rail] -= 1
            self._row.give_back(rail)
        self._row.complete(rail, num_bytes)

    def _refresh(self) -> None:
        view = self.view
        self._batch.begin()
        if self._policy.monitored:
            view.idle = self._monitor.idle_to_send()
            if self._policy.heeds_receiver:
                view.idle &= self._peer_idle
        count = self._row.borrowed if self._policy.bound == "rail" else self._row.borrowed_by_this
        for rail in rails_of(view.usable & ~view.direct):
            view.borrowed[rail] = count(rail)


class Credits:
    """Makes the credits of one channel: acknowledgements and grants, each with the rails that are idle at this end.

    Idle rails are looked up anew for every batch of credits.
    """

    def __init__(self, host: Host) -> None:
        self._monitor = host.monitor
        self._epoch, self._idle, self._batch = 0, 0, Batch(host.limits, host.policy)

    def make(self, kind: int, seq: int, size: int, slot: int = 0) -> Record:
        """Return the next credit."""
        if self._batch.is_over():
            self._idle = self._monitor.idle_to_receive()
            self._batch.begin()
        self._batch.count()
        self._epoch = (self._epoch + 1) % EPOCHS
        return Record(seq, size, slot, self._idle, self._epoch, kind)
