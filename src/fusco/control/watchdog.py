"""Every blocking wait of the host goes through here: time limit, liveness checks of peers, and the error message."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NoReturn, Protocol

from fusco.control.counters import Counters, CounterWait
from fusco.control.liveness import Liveness
from fusco.control.member_board import Exclusion, excluded
from fusco.control.status_server import Address, FailureReport, NoAnswer, Status, StatusServer, Unasked
from fusco.core.errors import ClosedError, ExcludedError, PeerFailureError, Stall, cleanup_after

# Shares of the limit: wait without progress, ask all ranks, settle, report to all ranks; the rest is slack.
_WAITING = 0.7
_ASKING = 0.15
_SETTLING = 0.05
_REPORTING = 0.05

_DEVICE_GAVE_UP = "a wait of the device ended without what it waited for"

# Pauses grow to half a millisecond: ranks may share cores, so a wait must not spin for long.
_FIRST_PAUSE_S, _MAX_PAUSE_S = 20e-6, 500e-6
_SECONDS_BETWEEN_CHECKS = 0.02

# Ranks often die together (out of memory, or with their node), and an error should name them all. A rank that seems to
# have left may have given this one up, with its failure report still under way. And what a rank sent before it failed
# or left may have come unseen. A tenth of a second is enough for all three, unless something still moves.
_MAX_SETTLING_S = 0.1

# Between machines, the last bytes of a rank may come after word that it left, by some of TCP's timeouts (0.2 s each).
_REMOTE_SETTLING, _MAX_REMOTE_SETTLING_S = 0.25, 1.0

# After a failure, a wait in which something still moves goes on for as long.
_MAX_MOVING_S = 1.0

# The same in ``check``, which a loop calls after each step.
_MAX_SETTLING_IN_CHECK_S = 0.02

# A rank that leaves reports its departure and waits for no answer: this takes as long as connecting.
_MAX_DEPARTURE_S = 0.5


@dataclass(frozen=True)
class Peer:
    """Another rank: the address of its status server, and its process if it is on this machine."""

    address: Address
    pid: int
    is_on_this_machine: bool


class Network(Protocol):
    """What a watchdog asks of a network; a ``Transport`` is one."""

    @property
    def failure(self) -> str:
        """The first error of the network; empty while it works."""

    def poll(self) -> bool:
        """Progress messages without blocking; return whether any bytes moved."""

    def awaited_sockets(self) -> list[int] | None:
        """Return the sockets that messages wait for, by ``readable`` and ``writable``.

        ``None`` if they are unknown, so that every wait must poll.
        """


class Watchdog:
    """Waits for peers and finds out which rank is at fault. One per communicator; not thread-safe."""

    def __init__(
        self,
        rank: int,
        peers: dict[int, Peer],
        status_server: StatusServer,
        timeout_s: float,
        spin_s: float = 0.0,
        numbers: Sequence[int] = (),
    ) -> None:
        """Watch the processes of ``peers``, all other ranks, on this machine.

        Errors name rank ``r`` as ``numbers[r]``, by default as ``r``. In each wait, limited to ``timeout_s``, this rank
        only yields its core for ``spin_s`` seconds before it sleeps.
        """
        self._rank, self._peers, self._status_server = rank, peers, status_server
        self._spin_s, self._numbers = spin_s, numbers
        self._set_limit(timeout_s)
        self._networks: list[Network] = []
        self._polled: list[Network] = []  # of these
        self._device_probes: list[Callable[[], Stall | None]] = []
        self._liveness = Liveness({rank: peer.pid for rank, peer in peers.items() if peer.is_on_this_machine})
        self._collective, self._operation = 0, ""
        self._since_progress = self._last_check = time.monotonic()
        self._pause_s, self._counter_wait = _FIRST_PAUSE_S, CounterWait()
        # When this wait found a rank missing, since anything moved; and when this collective found a failure.
        self._since_loss = self._since_failure = math.inf
        self._interruption = ""

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

    def watch_network(self, network: Network, connections: Mapping[int, int], *, polls: bool) -> None:
        """Watch a network, which has been connected through this watchdog, and ``connections``, as in ``Liveness``.

        Its sockets may end a wait for counters. With ``polls`` every wait progresses its messages.
        """
        self._networks.append(network)
        self._liveness.add_connections(connections)
        if polls:
            self._polled.append(network)

    def watch_device(self, stall: Callable[[], Stall | None]) -> None:
        """Watch a device: ``stall`` returns the wait that timed out, ``None`` while the device works."""
        self._device_probes.append(stall)

    def poll(self) -> bool:
        """Progress messages without blocking; return whether any bytes moved."""
        has_moved = False
        for network in self._polled:
            has_moved |= network.poll()
        return has_moved

    def check_device(self) -> None:
        """Raise ``PeerFailureError`` if a wait of the device has timed out."""
        if stall := self._device_stall():
            self.find_fault(stall, _DEVICE_GAVE_UP)

    def check(self) -> None:
        """Raise ``PeerFailureError`` if a rank is gone or has failed, or a wait of the device ended without its data.

        Does not wait for anything. Processes and connections are examined at most every 20 ms.
        """
        status_server, now = self._status_server, time.monotonic()
        is_gone = False
        if now - self._last_check >= _SECONDS_BETWEEN_CHECKS:
            self._last_check, is_gone = now, self.has_failed_rank or bool(self._network_failure())
        if is_gone or status_server.failure_report or status_server.departures or self._device_stall():
            self.begin(self._collective, "check")
            self._raise_what_is_wrong()

    def begin(self, collective: int, operation: str) -> None:
        """Note that a collective begins; its name appears in errors and in this rank's status."""
        self._collective, self._operation = collective, operation
        self._since_progress = self._status_server.note(collective, operation, "start")
        self._since_failure = math.inf
        self._restart_pauses()

    def end(self) -> None:
        """Note that the collective has ended on this rank."""
        self._status_server.note(self._collective, self._operation, "")

    def end_all(self) -> None:
        """Note that no collective will follow."""
        self._status_server.leave_siblings()

    def interrupt(self, reason: str) -> None:
        """Make all waits of this rank raise ``ClosedError``, the one under way first."""
        self._interruption = reason

    def progress(self) -> None:
        """Note that the wait has made progress, which restarts the limit."""
        self._since_progress = time.monotonic()
        self._restart_pauses()

    def _restart_pauses(self) -> None:
        self._pause_s, self._since_loss = _FIRST_PAUSE_S, math.inf
        self._counter_wait.restart()

    def wait_until(
        self, is_ready: Callable[[], bool], stall: Callable[[], Stall], counters: Counters | None = None
    ) -> None:
        """Wait until ``is_ready`` returns True; ``stall`` describes the wait, and is called between pauses only.

        All ``counters``, if given, have their values then, or a socket of a network is ready.
        """
        self.progress()
        while not is_ready():
            self.pause(stall, counters)
        self.progress()

    def pause(self, stall: Callable[[], Stall], counters: Counters | None = None, *, is_any: bool = False) -> None:
        """Sleep shortly for want of progress, or raise ``PeerFailureError`` once none can be expected.

        With ``counters`` no longer than until they have their values, or with ``is_any`` until one of them has.
        """
        if self._interruption:
            raise ClosedError(f"{self._operation} cannot go on: {self._interruption}")
        if self.poll():
            self.progress()
            return
        now = time.monotonic()
        if counters is not None and (sockets := self._awaited_sockets()) is not None:
            wait = self._counter_wait
            (wait.spin if now - self._since_progress < self._spin_s else wait.sleep)(counters, sockets, is_any=is_any)
        elif now - self._since_progress < self._spin_s:
            os.sched_yield()  # time.sleep(0) takes 53 us since Python 3.11 (CPython issue 125997), this one 0.3
        else:
            time.sleep(self._pause_s)
            self._pause_s = min(self._pause_s * 1.5, _MAX_PAUSE_S)
        if now - self._last_check < _SECONDS_BETWEEN_CHECKS:
            return
        self._last_check = now
        waiting_for = stall()
        self._status_server.note(self._collective, self._operation, waiting_for.phase)
        self._check_peers(waiting_for, now)
        self.check_device()
        if now - self._since_progress > _WAITING * self._timeout_s:
            self.find_fault(waiting_for, f"no progress for {now - self._since_progress:.1f} s")

    def _check_peers(self, waiting_for: Stall, now: float) -> None:
        """Raise if a failure is known, or a rank that the wait is for has left, and nothing has moved for some time.

        Meanwhile the caller looks again: what such ranks sent before may have come since it last did, and end the wait.
        """
        self._require_membership({})
        concerned = self._peers if waiting_for.is_for_local_device else waiting_for.on_ranks
        report, failure = self._status_server.failure_report, self._network_failure()
        has_failed = bool(report or failure) or any(map(self._liveness.is_dead, concerned))
        departed = [rank for rank in concerned if rank in self._status_server.departures]
        if not (has_failed or departed):
            self._since_loss = math.inf
            return
        self._since_loss = min(self._since_loss, now)
        self._since_failure = min(self._since_failure, now if has_failed else math.inf)
        is_near = has_failed or all(self._peers[rank].is_on_this_machine for rank in departed)
        settling_s = self._settling_s if is_near else self._remote_settling_s
        if now - self._since_loss < settling_s and now - self._since_failure < _MAX_MOVING_S:
            return
        if report:
            raise self._failure(waiting_for, report)
        if gone := self._dead() if has_failed else self._dead_or_departed():
            self._blame(waiting_for, gone, "; ".join(map(self._describe_end, gone)), has_left=True)
        self.find_fault(waiting_for, failure)

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
        unasked = [
            f"rank {self._name(rank)} {answer.reason}"
            for rank, answer in answers.items()
            if isinstance(answer, Unasked)
        ]
        silent = {rank: answer for rank, answer in answers.items() if isinstance(answer, NoAnswer)}
        if dead or silent:
            time.sleep(self._settling_s)
            reasons = [self._describe_end(rank) for rank in dead]
            reasons += [f"rank {self._name(rank)} {answer.reason}" for rank, answer in silent.items()] + unasked
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

    def _awaited_sockets(self) -> list[int] | None:
        found: list[int] = []
        for network in self._networks:
            if (more := network.awaited_sockets()) is None:
                return None
            found += more
        return found

    def _network_failure(self) -> str:
        return next((failure for network in self._networks if (failure := network.failure)), "")

    def _device_stall(self) -> Stall | None:
        for probe in self._device_probes:
            if stall := probe():
                return stall
        return None

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

    def _raise_what_is_wrong(self) -> NoReturn:
        def stall_of(ranks: tuple[int, ...]) -> Stall:
            return self._device_stall() or Stall("checking all ranks", ranks, "every rank at work", "fewer")

        self._require_membership({})
        if report := self._status_server.failure_report:
            raise self._failure(stall_of(report.peers), report)
        time.sleep(min(self._settling_s, _MAX_SETTLING_IN_CHECK_S))
        if gone := tuple(sorted({*self._dead_or_departed(), *self._liveness.disconnected()})):
            self._blame(stall_of(gone), gone, "; ".join(map(self._describe_end, gone)), has_left=True)
        self.find_fault(stall_of(()), self._network_failure() or _DEVICE_GAVE_UP)

    def _blame(self, stall: Stall, at_fault: tuple[int, ...], reason: str, *, has_left: bool) -> NoReturn:
        if not (failure_report := self._status_server.failure_report):  # another rank may have been quicker
            failure_report = FailureReport(at_fault, reason, self._rank, has_left)
            failure = self._failure(stall, failure_report)
            with cleanup_after(failure, "the other ranks could not be notified"):
                self._report(failure_report)
            self._status_server.failure_report = self._status_server.failure_report or failure_report
            raise failure
        raise self._failure(stall, failure_report)

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
            stall=self._named(stall),
            reason=failure_report.reason + found,
        )

    def exclusion(self, operation: str) -> ExcludedError | None:
        """Return the error of a call of a rank that others have left out; ``None`` while they have not."""
        found = self._status_server.board.exclusion
        return excluded(self._name(self._rank), operation, found) if found else None

    def _require_membership(self, answers: Mapping[int, object]) -> None:
        """Raise ``ExcludedError`` if a rank has said that this one is left out, or has gone on without it."""
        board = self._status_server.board
        ahead = [
            rank
            for rank, answer in answers.items()
            if isinstance(answer, Status) and answer.generation > board.installed.number
        ]
        if ahead and not board.exclusion:
            board.exclusion = Exclusion(tuple(map(self._name, ahead)), self._name(ahead[0]))
        if error := self.exclusion(self._operation):
            raise error

    def _name(self, rank: int) -> int:
        return self._numbers[rank] if self._numbers else rank

    def _named(self, stall: Stall) -> Stall:
        return replace(stall, on_ranks=tuple(map(self._name, stall.on_ranks)))


def _describe_status(status: Status | None) -> str:
    if status is None:
        return "could not be asked for its status, as this process has no descriptor or memory left"
    last = f"for {status.seconds:.1f} s (last call: {status.operation or 'none'})"
    if status.elsewhere:
        return f"is in {status.elsewhere} of another communicator, and has been outside any call of this one {last}"
    if not status.phase:
        return f"has been outside any fusco call {last}"
    return f"is in {status.operation}, phase '{status.phase}', for {status.seconds:.1f} s"
