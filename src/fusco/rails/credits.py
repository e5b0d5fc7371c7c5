"""Credits of a receiver: acknowledgements and grants, each with the rails that are idle at its end."""

from __future__ import annotations

from fusco.rails.host import Host
from fusco.rails.scheduler import Batch
from fusco.rails.wire import Record

_EPOCHS = 1 << 32


class Credits:
    """Makes the credits of one channel; idle rails are looked up anew for every batch of them."""

    def __init__(self, host: Host) -> None:
        self._monitor = host.monitor
        self._epoch, self._idle, self._batch = 0, 0, Batch(host.limits, host.policy)

    def make(self, kind: int, seq: int, size: int, slot: int = 0) -> Record:
        """Return the next credit."""
        if self._batch.is_over():
            self._idle = self._monitor.idle_to_receive()
            self._batch.begin()
        self._batch.count()
        self._epoch = (self._epoch + 1) % _EPOCHS
        return Record(seq, size, slot, self._idle, self._epoch, kind)
