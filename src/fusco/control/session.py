"""Sequence of collectives of one communicator: all ranks agree at the start of each; a failure ends the sequence."""

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
    cleanup_after,
)
from fusco.core.profile import Call, CallProfile

# Errors that all ranks raise in the same collective. The communicator stays usable.
_RECOVERABLE = (MismatchError, RejectedInputError, SharedMemoryError)


class Session:
    """Counts collectives and keeps all ranks in the same one. A failure inside a collective ends the session.

    ``sequence_number`` counts exchanges of records, the same on all ranks; a collective may have more than one.
    """

    def __init__(self, rank: int, connections: Connections, access: Access, on_broken: Callable[[], None]) -> None:
        """``on_broken`` is called as soon as the session of this rank ends by a failure."""
        self.rank, self._connections, self.access, self._on_broken = rank, connections, access, on_broken
        self._memory, self._watchdog = connections.memory, connections.watchdog
        self._exchange = RecordExchange(connections.memory, connections.mesh, connections.watchdog)
        self.sequence_number, self._name = 0, ""
        self.broken = ""
        self.profile = CallProfile()

    @contextmanager
    def collective(self, operation: str) -> Iterator[Call]:
        """Enter a collective; everything that it does happens inside this context. A failure ends the session."""
        with self.operation(operation):
            self.sequence_number += 1
            self._name = f"{operation} #{self.sequence_number}"
            self._watchdog.begin(self.sequence_number, self._name)
            self.profile = CallProfile(self._name)
            self._exchange.wait_for_peers_done(self.sequence_number)
            try:
                self._watchdog.check_device()
                yield Call(self.sequence_number, self.profile, functools.partial(self._agree_again, operation))
            except _RECOVERABLE:
                self._finish()
                raise
            self._finish()

    @contextmanager
    def point_to_point(self, name: str) -> Iterator[None]:
        """Enter an exchange of two ranks; everything that it does happens inside this context, on both."""
        with self.operation(name):
            self._watchdog.begin(self.sequence_number, name)
            try:
                yield
            except _RECOVERABLE:
                self._watchdog.end()
                raise
            self._watchdog.end()

    @contextmanager
    def operation(self, name: str) -> Iterator[None]:
        """Enter a use of the connections; raises ``ClosedError`` once the session has ended."""
        if self.broken:
            raise ClosedError(f"{name} was called on a communicator that cannot be used any more: {self.broken}")
        try:
            yield
        except _RECOVERABLE:
            raise
        except PeerFailureError as error:
            self.end(str(error))
            raise
        except BaseException as error:
            with cleanup_after(error, "the other ranks could not be notified"):
                self.abandon(f"failed in {name}: {type(error).__name__}: {error}")
            raise

    def check(self) -> None:
        """Raise ``PeerFailureError`` if a rank is gone or the device has given up, as ``Watchdog.check``; no wait."""
        with self.operation("check"):
            self._watchdog.check()

    def agree(self, fingerprint: CollectiveFingerprint, counts: Sequence[int] = ()) -> list[tuple[int, ...]]:
        """Exchange fingerprints and counts with all ranks; return the counts of all ranks, by rank.

        Raises:
            MismatchError: on all ranks, unless their fingerprints are equal.
            RejectedInputError: if other ranks have a rejection and this one has none.

        """
        record = Record(fingerprint, tuple(counts))
        records = self._exchange.exchange_records(self.sequence_number, record, self.profile)
        check_fingerprints([record.fingerprint for record in records], self.rank)
        return [record.counts for record in records]

    def _agree_again(self, operation: str, fields: Fields) -> int:
        """Compare more fields in the same collective, after all earlier records have been read."""
        self._memory.own.store(self._memory.layout.done_flag, self.sequence_number)
        self.sequence_number += 1
        self._watchdog.begin(self.sequence_number, self._name)
        self._exchange.wait_for_peers_done(self.sequence_number)
        self.agree(CollectiveFingerprint(operation, fields))
        return self.sequence_number

    def abandon(self, reason: str) -> None:
        """Notify all other ranks that this one has failed, and refuse further calls."""
        if not self.broken:
            self.end(reason)
            self._watchdog.give_up(f"rank {self.rank} {reason}")

    def depart(self, reason: str) -> None:
        """Notify all other ranks that this one has left; only ranks that wait for it raise."""
        if not self.broken:
            self._watchdog.leave(reason)

    def end(self, reason: str) -> None:
        """Refuse all further calls."""
        self.broken = reason
        self._on_broken()

    def close(self) -> None:
        """Free all connections without waiting for other ranks."""
        self._connections.close()

    def _finish(self) -> None:
        self._memory.own.store(self._memory.layout.done_flag, self.sequence_number)
        self._watchdog.end()
