"""Sequence of collectives of one communicator: all ranks agree at the start of each; a failure ends the sequence."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

from fusco.control.connect import Connections
from fusco.control.fingerprint import CollectiveFingerprint, Fields
from fusco.control.record_exchange import RecordExchange
from fusco.control.record_round import Attachment
from fusco.control.repeated_record import ALL_EQUAL, PEERS_NOT_DONE, RECORDS_MISSING, RepeatedRecord
from fusco.core.access import Access
from fusco.core.errors import (
    ClosedError,
    MismatchError,
    PeerFailureError,
    RejectedInputError,
    SharedMemoryError,
    cleanup_after,
)
from fusco.core.profile import Call, CallProfile, ProfileHook, RecordedProfile, report
from fusco.core.timeline import HostTimeline

# Errors that all ranks raise in the same collective. The communicator stays usable.
_RECOVERABLE = (MismatchError, RejectedInputError, SharedMemoryError)
_UNDER_WAY = (0.0, 0.0, lambda _: None)  # of a repeated collective that is not complete; see ``leave_repeated``


class Session:
    """Counts collectives and keeps all ranks in the same one. A failure inside a collective ends the session.

    ``sequence_number`` counts exchanges of records, the same on all ranks; a collective may have more than one.
    ``has_published`` if ``repeat`` has published this rank's record, and so accepted its input, but could not do the
    rest. ``number`` is that of this rank in the group, where ranks may be absent. The next members go on with the
    status server of ``connections``.
    """

    def __init__(self, rank: int, connections: Connections, access: Access, on_broken: Callable[[], None]) -> None:
        """``on_broken`` is called as soon as the session of this rank ends by a failure."""
        self.rank, self.connections, self.access, self._on_broken = rank, connections, access, on_broken
        self.number = connections.memory.layout.topology.numbers[rank]
        self._memory, self._watchdog = connections.memory, connections.watchdog
        self._exchange = RecordExchange(connections.memory, connections.mesh, connections.watchdog)
        self.sequence_number, self._name = 0, ""
        self.has_published = False
        self.broken = ""
        self.blamed: tuple[int, ...] = ()  # by the error that has ended the session, by number
        self._profile = CallProfile()
        self.timeline: HostTimeline | None = None  # while one is recorded
        self._begin_s = 0.0
        self.hooks: Sequence[ProfileHook] = ()  # called after each collective
        self._repeated: tuple[float, float, Callable[[CallProfile], None]] | None = None  # of ``leave_repeated``

    @contextmanager
    def collective(self, operation: str) -> Iterator[Call]:
        """Enter a collective; everything that it does happens inside this context. A failure ends the session."""
        call = self.begin(operation)
        try:
            yield call
        except BaseException as error:
            self.leave(operation, error)
            raise
        self.leave(operation)

    def repeat(self, operation: str, record: RepeatedRecord, handle: int) -> bool:
        """Enter a collective, agree with all ranks and let go of the records, as far as one compiled call does it.

        Return False if something is not as it was before: ``begin`` and ``agree`` must follow, with the same input.
        If the record has been published already, they go on from there. ``leave`` must follow in any case.
        """
        if self.broken:
            return False
        number = self.sequence_number + 1
        name, outcome = f"{operation} #{number}", record.publish(number, handle)
        if outcome == PEERS_NOT_DONE:
            self._watchdog.begin(number, name)
            self._exchange.wait_for_peers_done(number)
            self._require_usable(operation)  # a signal handler may have closed it, and the memory is gone
            outcome = record.publish(number, handle)
        if outcome <= PEERS_NOT_DONE:
            return False
        self.sequence_number, self._name, self._repeated = number, name, _UNDER_WAY
        self._watchdog.begin(number, name)
        self._exchange.written = record.text
        if outcome == RECORDS_MISSING:
            self._exchange.go_on(number, record)
            self._require_usable(operation)
            outcome = record.compare(number)
        self.has_published = outcome != ALL_EQUAL
        return not self.has_published

    def end_interrupted(self) -> None:
        """End the session: a call was interrupted between ``repeat`` and ``begin``, and others count on its record."""
        self.has_published = False
        self.abandon(f"was interrupted in {self._name}, after it had published its input")

    def leave_repeated(self, begin_s: float, agreed_s: float, count: Callable[[CallProfile], None]) -> None:
        """Leave a collective in which ``repeat`` returned True.

        That was called at ``begin_s`` of ``time.monotonic`` and returned at ``agreed_s``. ``count`` sets what the
        profile has besides times.
        """
        self._repeated = agreed_s - begin_s, self._watchdog.end() - agreed_s, count
        if self.hooks:
            report(self.profile, self.hooks)

    @property
    def profile(self) -> CallProfile:
        """Profile of the latest collective; that of a repeated one is made when it is asked for."""
        if self._repeated is not None:
            planning_s, wire_s, count = self._repeated
            self._profile, self._repeated = CallProfile(self._name, planning_s=planning_s, wire_s=wire_s), None
            count(self._profile)
        return self._profile

    def begin(self, operation: str) -> Call:
        """Enter a collective; raises ``ClosedError`` once the session has ended. ``leave`` must follow."""
        if self.has_published and not self._name.startswith(f"{operation} #"):
            self.end_interrupted()
        if self.broken:
            self._require_usable(operation)
        try:
            if not self.has_published:
                self._repeated = None  # of an earlier collective
                self._begin_exchange(f"{operation} #{self.sequence_number + 1}")
            self._profile, self._repeated = CallProfile(self._name), None
            if self.timeline is not None:
                self._profile = recorded = RecordedProfile(self._name)
                recorded.timeline, self._begin_s = self.timeline, time.perf_counter()
            self._watchdog.check_device()
        except BaseException as error:
            self.fail(operation, error)
            raise
        return Call(self.sequence_number, self._profile, functools.partial(self._agree_again, operation))

    def leave(self, operation: str, error: BaseException | None = None) -> None:
        """Leave a collective that is complete, or in which an error was raised."""
        if error is None or isinstance(error, _RECOVERABLE):
            self.has_published = False
            self._memory.write_done(self.sequence_number)
            self._watchdog.end()
            if self.timeline is not None:
                self.timeline.add("calls", self._name, self._begin_s, time.perf_counter())
            if self.hooks and error is None:
                report(self.profile, self.hooks)
        else:
            self.fail(operation, error)

    def fail(self, operation: str, error: BaseException) -> None:
        """End the session because of an error; all other ranks are notified."""
        self.has_published = False
        if isinstance(error, PeerFailureError):
            self.blamed = error.peers
            self.end(str(error))
            return
        with cleanup_after(error, "the other ranks could not be notified"):
            self.abandon(f"failed in {operation}: {type(error).__name__}: {error}")

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
        self._require_usable(name)
        try:
            yield
        except _RECOVERABLE:
            raise
        except BaseException as error:
            self.fail(name, error)
            raise

    def limited(self, timeout_s: float) -> AbstractContextManager[None]:
        """Return a context in which waits are limited to ``timeout_s``."""
        return self._watchdog.limited(timeout_s)

    def check(self) -> None:
        """Raise ``PeerFailureError`` if a rank is gone or the device has given up, as ``Watchdog.check``; no wait."""
        with self.operation("check"):
            self._watchdog.check()

    def agree(
        self,
        fingerprint: CollectiveFingerprint,
        counts: Sequence[int] = (),
        handle: int = 0,
        attachment: Attachment | Callable[[], Attachment] | None = None,
    ) -> Sequence[tuple[int, ...]]:
        """Exchange fingerprints and counts with all ranks; return the counts of all ranks, by rank.

        Args:
            fingerprint: equal on all ranks, unless one has rejected its input.
            counts: as many on all ranks.
            handle: number of the collective that made the handle that this one uses, equal on all ranks; 0 for none.
            attachment: data that goes with the record to other nodes, see ``RecordExchange``; or a function that
                returns it once all ranks of the node agree, with no ``counts``.

        Raises:
            MismatchError: on all ranks, unless their fingerprints and handles are equal.
            RejectedInputError: if other ranks have a rejection and this one has none.
        """
        if self.has_published:
            self.has_published = False
            return self._exchange.counts_of_all(fingerprint, len(counts))
        of_ranks = self._exchange.exchange_records(
            self.sequence_number, fingerprint, handle, counts, self._profile, attachment
        )
        if self.broken:  # a signal handler has closed it
            self._require_usable(fingerprint.operation)
        return of_ranks

    def _agree_again(self, operation: str, fields: Fields) -> int:
        """Compare more fields in the same collective, after all earlier records have been read."""
        self._memory.write_done(self.sequence_number)
        self._begin_exchange(self._name)
        self.agree(CollectiveFingerprint(operation, fields))
        return self.sequence_number

    def _begin_exchange(self, name: str) -> None:
        self.sequence_number += 1
        self._name = name
        self._watchdog.begin(self.sequence_number, name)
        self._exchange.wait_for_peers_done(self.sequence_number)

    def _require_usable(self, name: str) -> None:
        if self.broken:
            if error := self._watchdog.exclusion(name):
                raise error
            raise ClosedError(f"{name} was called on a communicator that cannot be used any more: {self.broken}")

    def abandon(self, reason: str) -> None:
        """Notify all other ranks that this one has failed, and refuse further calls."""
        if not self.broken:
            self.end(reason)
            self._watchdog.give_up(f"rank {self.number} {reason}")

    def interrupt(self, reason: str) -> None:
        """As ``abandon``, from a signal handler inside a call, which then raises ``ClosedError``."""
        self.abandon(reason)
        self._watchdog.interrupt(reason)

    def depart(self, reason: str) -> None:
        """Notify all other ranks that this one has left; only ranks that wait for it raise."""
        if not self.broken:
            self._watchdog.leave(reason)

    def end(self, reason: str) -> None:
        """Refuse all further calls."""
        self.broken = reason
        self.connections.status_server.leave_siblings()
        self._on_broken()

    def close(self, *, holds_status_server: bool = False) -> None:
        """Free all connections without waiting for other ranks; the status server, too, unless it is to go on."""
        self.connections.status_server.is_held = holds_status_server
        self.connections.close()
