"""The life of an engine: one collective after the other, an agreement at the start of each, and the end of it all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from fusco.control.connect import Connections
from fusco.control.fingerprint import Agreement, Record, check_agreement
from fusco.control.record_exchange import Exchange
from fusco.core.errors import (
    ClosedError,
    MismatchError,
    PeerFailureError,
    RejectedInputError,
    SharedMemoryError,
    beside,
)
from fusco.core.profile import CallProfile

# What all ranks learn of together, each by an error of its own; they go on afterwards.
_HARMLESS = (MismatchError, RejectedInputError, SharedMemoryError)


class Rounds:
    """Counts collectives, and keeps all ranks in the same one. What fails in one of them breaks the engine for good.

    ``number`` grows with each exchange of records, the same on all ranks; a collective may have more than one.
    """

    def __init__(self, rank: int, connections: Connections, on_broken: Callable[[], None] = lambda: None) -> None:
        """``on_broken`` is called as soon as it is clear that this rank will not go on."""
        self._rank, self._on_broken = rank, on_broken
        self._memory, self._watch = connections.memory, connections.watch
        self._exchange = Exchange(connections.memory, connections.mail, connections.watch)
        self.number, self._name = 0, ""
        self.broken = ""
        self.profile = CallProfile()

    @contextmanager
    def collective(self, operation: str) -> Iterator[None]:
        """See ``Engine.collective``."""
        with self.operation(operation):
            self.number += 1
            self._name = f"{operation} #{self.number}"
            self._watch.begin(self.number, self._name)
            self.profile = CallProfile(self._name)
            self._exchange.wait_for_peers_done(self.number)
            try:
                yield
            except _HARMLESS:
                self._finish()
                raise
            self._finish()

    @contextmanager
    def operation(self, name: str) -> Iterator[None]:
        """Whatever uses the connections happens inside this context."""
        if self.broken:
            raise ClosedError(f"{name} was called on a communicator that cannot be used any more: {self.broken}")
        try:
            yield
        except _HARMLESS:
            raise
        except PeerFailureError as error:
            self.end(str(error))
            raise
        except BaseException as error:
            with beside(error, "the other ranks could not be told"):
                self.abandon(f"failed in {name}: {type(error).__name__}: {error}")
            raise

    def publish(self, agreement: Agreement, counts: Sequence[int]) -> list[Record]:
        """Tell all ranks an agreement and some counts, and learn theirs; raises unless all agree."""
        records = self._exchange.exchange_records(self.number, Record(agreement, tuple(counts)), self.profile)
        check_agreement([record.agreement for record in records], self._rank)
        return records

    def publish_more(self, agreement: Agreement) -> None:
        """Compare another agreement in the same collective, once all records before it have been read."""
        self._memory.own.store(self._memory.layout.done_flag, self.number)
        self.number += 1
        self._watch.begin(self.number, self._name)
        self._exchange.wait_for_peers_done(self.number)
        self.publish(agreement, [])

    def abandon(self, reason: str) -> None:
        """See ``Engine.abandon``."""
        if not self.broken:
            self.end(reason)
            self._watch.give_up(f"rank {self._rank} {reason}")

    def depart(self, reason: str) -> None:
        """See ``Engine.depart``."""
        if not self.broken:
            self._watch.leave(reason)

    def end(self, reason: str) -> None:
        """Refuse all further calls."""
        self.broken = reason
        self._on_broken()

    def _finish(self) -> None:
        self._memory.own.store(self._memory.layout.done_flag, self.number)
        self._watch.end()
