"""Finds the rank at fault for a wait that cannot end, tells all others, and words the error."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NoReturn

from fusco.control.liveness import Liveness
from fusco.control.member_board import Exclusion, excluded
from fusco.control.status_server import Address, FailureReport, NoAnswer, Status, StatusServer
from fusco.core.errors import ExcludedError, PeerFailureError, Stall, cleanup_after

# Shares of the limit after a wait without progress: ask all ranks, settle, report to all ranks; the rest is slack.
_ASKING = 0.15
_SETTLING = 0.05
_REPORTING = 0.05

# Ranks often die together (out of memory, or with their node), and an error should name them all. A rank that seems to
# have left may have given this one up, with its failure report still under way. And what a rank sent before it failed
# or left may have come unseen. A tenth of a second is enough for all three, unless something still moves.
_MAX_SETTLING_S = 0.1

# Between machines, the last bytes of a rank may come after word that it left, by some of TCP's timeouts (0.2 s each).
_REMOTE_SETTLING, _MAX_REMOTE_SETTLING_S = 0.25, 1.0

# A rank that leaves reports its departure and waits for no answer: this takes as long as connecting.
_MAX_DEPARTURE_S = 0.5


@dataclass(frozen=True)
class Peer:
    """Another rank: the address of its status server, and its process if it is on this machine."""

    address: Address
    pid: int
    is_on_this_machine: bool


class FaultFinder:
    """Knows the other ranks of a communicator, finds which are at fault, and tells all of them. Not thread-safe."""

    def __init__(
        self, rank: int, peers: dict[int, Peer], status_server: StatusServer, timeout_s: float, numbers: Sequence[int]
    ) -> None:
        """Know ``peers``, all other ranks. Errors name rank ``r`` as ``numbers[r]``, or as ``r`` if there are none."""
        self._rank, self._peers, self._status_server, self._numbers = rank, peers, status_server, numbers
        self._set_limit(timeout_s)
        self._liveness = Liveness({rank: peer.pid for rank, peer in peers.items() if peer.is_on_this_machine})
        self._collective, self._operation = 0, ""

    @contextmanager
    def limited(self, timeout_s: float) -> Iterator[None]:
        """Limit the waits inside to ``timeout_s``."""
        before = self._timeout_s
        self._set_limit(timeout_s)
        try:
            yield
        finally:
            self._set_limit(before)

    def _set_limit(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._settling_s = min(_SETTLING * timeout_s, _MAX_SETTLING_S)
        self._remote_settling_s = min(_REMOTE_SETTLING * timeout_s, _MAX_REMOTE_SETTLING_S)

    def find_fault(self, stall: Stall, symptom: str) -> NoReturn:
        """Ask all ranks for their status, decide which are at fault, report them to all ranks, and raise."""
        statuses = self.query_all_ranks(stall, symptom)
        late = [rank for rank, status in statuses.items() if status.collective < self._collective]
        blamed = tuple(sorted(late or {rank for rank in stall.on_ranks if rank in self._peers}))
        doing = "; ".join(f"rank {self._name(rank)} {_describe_status(statuses.get(rank))}" for rank in blamed)
        if not blamed:
            own = self._name(self._rank)
            doing = f"rank {own}, in phase '{stall.phase}', waits for no other rank, and all of them are alive"
        self._blame(stall, blamed, f"{symptom}; {doing}", has_left=False)

    def query_all_ranks(self, stall: Stall, symptom: str) -> dict[int, Status]:
        """Ask all ranks for their status and return it, by rank.

        If some are dead or do not answer, report them to all ranks and raise ``PeerFailureError``. Also raise if
        another rank has reported a failure meanwhile. Ranks that this process could not ask are left out.
        """
        dead = self._dead_or_departed()
        answers = self._status_server.ask(
            {rank: peer.address for rank, peer in self._peers.items() if rank not in dead}, _ASKING * self._timeout_s
        )
        self._require_membership(answers)
        without = {rank: answer for rank, answer in answers.items() if not isinstance(answer, Status)}
        silent = {rank: answer for rank, answer in without.items() if isinstance(answer, NoAnswer)}
        if dead or silent:
            time.sleep(self._settling_s)
            reasons = [*map(self._describe_end, dead)]
            reasons += [f"rank {self._name(rank)} {answer.reason}" for rank, answer in without.items()]
            has_left = all(answer.has_left for answer in silent.values())
            self._blame(stall, tuple(sorted((*dead, *silent))), f"{symptom}; {'; '.join(reasons)}", has_left=has_left)
        if self._status_server.failure_report:
            raise self._failure(stall, self._status_server.failure_report)
        return {rank: answer for rank, answer in answers.items() if isinstance(answer, Status)}

    def give_up(self, reason: str, at_fault: tuple[int, ...] | None = None) -> None:
        """Report to all other ranks that this one has failed, by default through its own fault: all of them raise."""
        self._report(FailureReport((self._rank,) if at_fault is None else at_fault, reason, self._rank, has_left=True))

    def leave(self, reason: str) -> None:
        """Report to all other ranks that this one has left: those that wait for it, now or later, raise.

        Waits for no rank, and for the network at most half a second.
        """
        limit_s = min(_REPORTING * self._timeout_s, _MAX_DEPARTURE_S)
        self._status_server.report_departure(self._living(), self._rank, reason, limit_s)

    def report_the_dead(self) -> None:
        """Report dead ranks to all others, which may be on machines from where they are not seen. Any thread may."""
        if dead := tuple(sorted({*self._dead(), *self._liveness.disconnected()})):
            reason = "; ".join(map(self._describe_end, dead))
            self._report(FailureReport(dead, reason, self._rank, has_left=True))

    @property
    def has_failed_rank(self) -> bool:
        """True if a rank has died, its connection is closed, or a rank has reported a failure. Any thread may ask."""
        server = self._status_server
        return bool(server.failure_report or server.board.exclusion or self._dead() or self._liveness.disconnected())

    @property
    def has_departed_rank(self) -> bool:
        """True if a rank has reported that it left. Any thread may ask."""
        return bool(self._status_server.departures)

    def close(self) -> None:
        """Stop watching processes and connections."""
        self._liveness.close()

    def _dead(self) -> tuple[int, ...]:
        return tuple(filter(self._liveness.is_dead, self._peers))

    def _dead_or_departed(self) -> tuple[int, ...]:
        return tuple(sorted({*self._dead(), *self._status_server.departures}))

    def _describe_end(self, rank: int) -> str:
        name = self._name(rank)
        if reason := self._status_server.departures.get(rank):
            return f"rank {name} {reason}"
        if self._liveness.is_dead(rank):
            return f"rank {name} (pid {self._peers[rank].pid}) is dead"
        return f"rank {name} is dead or has left: its connection is closed"

    def _blame(self, stall: Stall, at_fault: tuple[int, ...], reason: str, *, has_left: bool) -> NoReturn:
        known = self._status_server.failure_report  # another rank may have been quicker
        failure_report = known or FailureReport(at_fault, reason, self._rank, has_left)
        failure = self._failure(stall, failure_report)
        if not known:
            with cleanup_after(failure, "the other ranks could not be notified"):
                self._report(failure_report)
            self._status_server.failure_report = self._status_server.failure_report or failure_report
        raise failure

    def _report(self, failure_report: FailureReport) -> None:
        # Also to the ranks at fault: a late or stopped rank should learn why the others have left when it continues.
        self._status_server.report_failure(self._living(), failure_report, _REPORTING * self._timeout_s)

    def _living(self) -> dict[int, Address]:
        return {rank: peer.address for rank, peer in self._peers.items() if not self._liveness.is_dead(rank)}

    def _failure(self, stall: Stall, failure_report: FailureReport) -> PeerFailureError:
        found_by = failure_report.found_by
        found = "" if found_by == self._rank else f" (found by rank {self._name(found_by)})"
        return PeerFailureError(
            rank=self._name(self._rank),
            peers=tuple(map(self._name, failure_report.peers)),
            operation=self._operation,
            has_left=failure_report.has_left,
            stall=replace(stall, on_ranks=tuple(map(self._name, stall.on_ranks))),
            reason=failure_report.reason + found,
        )

    def exclusion(self, operation: str) -> ExcludedError | None:
        """Return the error of a call of a rank that others have left out; ``None`` while they have not."""
        found = self._status_server.board.exclusion
        return excluded(self._name(self._rank), operation, found) if found else None

    def _require_membership(self, answers: Mapping[int, object]) -> None:
        """Raise ``ExcludedError`` if a rank has said that this one is left out, or has gone on without it."""
        board = self._status_server.board
        number = board.installed.number
        ahead = [rank for rank, each in answers.items() if isinstance(each, Status) and each.generation > number]
        if ahead and not board.exclusion:
            board.exclusion = Exclusion(tuple(map(self._name, ahead)), self._name(ahead[0]))
        if error := self.exclusion(self._operation):
            raise error

    def _name(self, rank: int) -> int:
        return self._numbers[rank] if self._numbers else rank


def _describe_status(status: Status | None) -> str:
    if status is None:
        return "could not be asked for its status, as this process has no descriptor or memory left"
    last = f"for {status.seconds:.1f} s (last call: {status.operation or 'none'})"
    if status.elsewhere:
        return f"is in {status.elsewhere} of another communicator, and has been outside any call of this one {last}"
    if not status.phase:
        return f"has been outside any fusco call {last}"
    return f"is in {status.operation}, phase '{status.phase}', for {status.seconds:.1f} s"
