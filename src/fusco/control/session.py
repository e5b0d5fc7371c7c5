"""The life of a communicator: one collective after the other, an agreement at the start of each, and the end of it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from fusco.control.connect import Connections
from fusco.control.fingerprint import CollectiveFingerprint, Fields, Record, check_fingerprints
from fusco.control.record_exchange import RecordExchange
from fusco.core.access import Access
from fusco.core.errors import (
    ClosedError,
    MismatchError,
    PeerFailureError,
    RejectedInputError,
    SharedMemoryError,
    beside,
)
from fusco.core.profile import Call, CallProfile

# What all ranks learn of together, each by an error of its own; they go on afterwards.
_HARMLESS = (MismatchError, RejectedInputError, SharedMemoryError)


class Session:
    """Counts collectives, and keeps all ranks in the same one. What fails in one of them ends the session for good.

    ``sequence_number`` grows with each exchange of records, the same on all ranks; a collective may have more than one.
    """

    def __init__(self, rank: int, connections: Connections, access: Access, on_broken: Callable[[], None]) -> None:
        """``on_broken`` is called as soon as it is clear that this rank will not go on."""
        self.rank, self._connections, self.access, self._on_broken = rank, connections, access, on_broken
        self._memory, self._watchdog = connections.memory, connections.watchdog
        self._exchange = RecordExchange(connections.memory, connections.mesh, connections.watchdog)
        self.sequence_number, self._name = 0, ""
        self.broken = ""
        self.profile = CallProfile()

    @contextmanager
    def collective(self, operation: str) -> Iterator[Call]:
        """Everything a collective does happens inside this context; a failure inside it ends the session."""
        with self.operation(operation):
            self.sequence_number += 1
            self._name = f"{operation} #{self.sequence_number}"
            self._watchdog.begin(self.sequence_number, self._name)
            self.profile = CallProfile(self._name)
            self._exchange.wait_for_peers_done(self.sequence_number)
            try:
                self._watchdog.check_device()
                yield Call(self.sequence_number, self.profile, functools.partial(self._agree_again, operation))
            except _HARMLESS:
                self._finish()
                raise
            self._finish()

    @contextmanager
    def point_to_point(self, name: str) -> Iterator[None]:
        """Everything that two ranks do by themselves happens inside this context, on both."""
        with self.operation(name):
            self._watchdog.begin(self.sequence_number, name)
            try:
                yield
            except _HARMLESS:
                self._watchdog.end()
                raise
            self._watchdog.end()

    @contextmanager
    def operation(self, name: str) -> Iterator[None]:
        """Whatever uses the connections happens inside this context; ``ClosedError`` once the session has ended."""
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

    def agree(self, fingerprint: CollectiveFingerprint, counts: Sequence[int] = ()) -> list[tuple[int, ...]]:
        """Tell all ranks a fingerprint and some counts; returns the counts of all ranks, by rank.

        Raises:
            MismatchError: on all ranks, unless their fingerprints are equal.
            RejectedInputError: where other ranks carry a rejection and this one does not.

        """
        record = Record(fingerprint, tuple(counts))
        records = self._exchange.exchange_records(self.sequence_number, record, self.profile)
        check_fingerprints([record.fingerprint for record in records], self.rank)
        return [record.counts for record in records]

    def _agree_again(self, operation: str, fields: Fields) -> int:
        """Compare more fields in the same collective, once all records before have been read."""
        self._memory.own.store(self._memory.layout.done_flag, self.sequence_number)
        self.sequence_number += 1
        self._watchdog.begin(self.sequence_number, self._name)
        self._exchange.wait_for_peers_done(self.sequence_number)
        self.agree(CollectiveFingerprint(operation, fields))
        return self.sequence_number

    def abandon(self, reason: str) -> None:
        """Tell all other ranks that this one will not come back, and refuse further calls."""
        if not self.broken:
            self.end(reason)
            self._watchdog.give_up(f"rank {self.rank} {reason}")

    def depart(self, reason: str) -> None:
        """Tell all other ranks that this one has left; only those raise that wait for it."""
        if not self.broken:
            self._watchdog.leave(reason)

    def end(self, reason: str) -> None:
        """Refuse all further calls."""
        self.broken = reason
        self._on_broken()

    def close(self) -> None:
        """Give all connections back, without waiting for anybody."""
        self._connections.close()

    def _finish(self) -> None:
        self._memory.own.store(self._memory.layout.done_flag, self.sequence_number)
        self._watchdog.end()
