"""The one place where the library waits: with a limit, with an eye on the peers, and with words for the error."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from fusco.control.status_server import FailureReport, NoAnswer, Status, StatusServer, StatusServerAddress, Unasked
from fusco.core.errors import PeerFailureError, Stall, TransportError, beside, reason_of

# Shares of the limit: wait without progress, then ask everybody, settle, then tell everybody; the rest is slack.
_PATIENCE = 0.7
_ASKING = 0.15
_SETTLING = 0.05
_TELLING = 0.05

# Pauses grow from a yield to half a millisecond: ranks may share cores, so nobody may spin.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 20e-6, 500e-6
_SECONDS_BETWEEN_CHECKS = 0.02

# Ranks tend to die together (of memory, of their node), and an error should name them all. And those that seem to have
# left may have given this one up, and their verdict be on its way. A tenth of a second is enough for both.
_LONGEST_SETTLING_S = 0.1

# Who leaves says so and waits for nobody: telling takes as long as connecting does.
_LONGEST_LEAVING_S = 0.5


@dataclass(frozen=True)
class Peer:
    """Another rank: where its sentinel listens, and its process if it is on this machine."""

    address: StatusServerAddress
    pid: int
    is_on_this_machine: bool


class Watchdog:
    """Waits for peers. One for each communicator; not for several threads."""

    def __init__(
        self, rank: int, peers: dict[int, Peer], status_server: StatusServer, timeout_s: float, spin_s: float = 0.0
    ) -> None:
        """``spin_s``: how long to look without a pause first; only where ranks do not share cores."""
        self._rank, self._peers, self._status_server, self._timeout_s = rank, peers, status_server, timeout_s
        self._spin_s = spin_s
        self._settling_s = min(_SETTLING * timeout_s, _LONGEST_SETTLING_S)
        self._network_probes: list[Callable[[], str]] = []
        self._device_probes: list[Callable[[], Stall | None]] = []
        self._process_fds = {rank: _open_process(peer.pid) for rank, peer in peers.items() if peer.is_on_this_machine}
        self._collective, self._operation = 0, ""
        self._since_progress = self._last_check = time.monotonic()
        self._pause_s = _FIRST_PAUSE_S

    def add_network_probe(self, failure: Callable[[], str]) -> None:
        """Ask this, too, whether a network has failed: it says how, or ``""`` while the network works.

        By a method, as networks are connected with a watch, which must exist before.
        """
        self._network_probes.append(failure)

    def add_device_probe(self, stall: Callable[[], Stall | None]) -> None:
        """Ask this, too, what a device waited for when its own limit ran out: ``None`` while it works."""
        self._device_probes.append(stall)

    def check_device(self) -> None:
        """Raise ``PeerFailureError`` if a wait of the device has run out."""
        if stall := self._device_stall():
            self.find_fault(stall, "the device waited in vain")

    def begin(self, collective: int, operation: str) -> None:
        """A collective begins; its name appears in errors and in answers to other ranks."""
        self._collective, self._operation = collective, operation
        self._status_server.note(collective, operation, "start")
        self.progress()

    def end(self) -> None:
        """The collective is over on this rank."""
        self._status_server.note(self._collective, self._operation, "")

    def progress(self) -> None:
        """Something moved, so the limit starts anew."""
        self._since_progress = time.monotonic()
        self._pause_s = _FIRST_PAUSE_S

    def wait_until(self, is_ready: Callable[[], bool], stall: Callable[[], Stall]) -> None:
        """Wait for a condition; ``stall`` says what is waited for, and is called only when there is time for it."""
        self.progress()
        while not is_ready():
            self.pause(stall)
        self.progress()

    def pause(self, stall: Callable[[], Stall]) -> None:
        """Nothing moved: sleep a little, or raise ``PeerFailureError`` once it is clear that nothing will move."""
        now = time.monotonic()
        if now - self._since_progress < self._spin_s:
            time.sleep(0)  # other threads may want the interpreter
        else:
            time.sleep(self._pause_s)
            self._pause_s = min(self._pause_s * 1.5, _LONGEST_PAUSE_S)
        if now - self._last_check < _SECONDS_BETWEEN_CHECKS:
            return
        self._last_check = now
        waiting_for = stall()
        self._status_server.note(self._collective, self._operation, waiting_for.phase)
        if self._status_server.failure_report:
            raise self._failure(waiting_for, self._status_server.failure_report)
        concerned = self._peers if waiting_for.is_for_own_device else waiting_for.on_ranks
        has_died, failure = any(map(self._is_dead, concerned)), self._network_failure()
        if has_died or failure:
            time.sleep(self._settling_s)
            if dead := self._dead():
                self._blame(waiting_for, dead, "; ".join(map(self._describe_end, dead)), has_left=True)
            self.find_fault(waiting_for, failure)
        if not self._status_server.departures.keys().isdisjoint(concerned):
            self._blame_the_departed(stall)
        self.check_device()
        if now - self._since_progress > _PATIENCE * self._timeout_s:
            self.find_fault(waiting_for, f"no progress for {now - self._since_progress:.1f} s")

    def find_fault(self, stall: Stall, symptom: str) -> NoReturn:
        """Ask all ranks what they are doing, decide who is at fault, tell everybody, and raise."""
        statuses = self.ask_everybody(stall, symptom)
        late = [rank for rank, status in statuses.items() if status.collective < self._collective]
        blamed = tuple(late or [rank for rank in stall.on_ranks if rank in self._peers])
        doing = "; ".join(f"rank {rank} {_describe_status(statuses.get(rank))}" for rank in blamed)
        if not blamed:
            doing = f"rank {self._rank}, in phase '{stall.phase}', waits for none of the others, which are all there"
        self._blame(stall, blamed, f"{symptom}; {doing}", has_left=False)

    def ask_everybody(self, stall: Stall, symptom: str) -> dict[int, Status]:
        """Ask all ranks what they are doing; if some are dead or do not answer, tell everybody, and raise.

        Raises what another rank found, too, if it was quicker. Ranks that could not be asked, for a reason of this
        process, are left out.
        """
        dead = self._gone()
        answers = self._status_server.ask(
            {rank: peer.address for rank, peer in self._peers.items() if rank not in dead}, _ASKING * self._timeout_s
        )
        unasked = [f"rank {rank} {answer.reason}" for rank, answer in answers.items() if isinstance(answer, Unasked)]
        silent = {rank: answer for rank, answer in answers.items() if isinstance(answer, NoAnswer)}
        if dead or silent:
            time.sleep(self._settling_s)
            reasons = [self._describe_end(rank) for rank in dead]
            reasons += [f"rank {rank} {answer.reason}" for rank, answer in silent.items()] + unasked
            has_left = all(answer.has_left for answer in silent.values())
            self._blame(stall, tuple(sorted((*dead, *silent))), f"{symptom}; {'; '.join(reasons)}", has_left=has_left)
        if self._status_server.failure_report:
            raise self._failure(stall, self._status_server.failure_report)
        return {rank: answer for rank, answer in answers.items() if isinstance(answer, Status)}

    def give_up(self, reason: str) -> None:
        """Tell all other ranks that this one leaves for a reason of its own: all of them raise."""
        self._tell(FailureReport((self._rank,), reason, self._rank, has_left=True))

    def leave(self, reason: str) -> None:
        """Tell all other ranks that this one has left: those raise that wait for it, now or later.

        Waits for nobody, but for the network up to half a second.
        """
        limit_s = min(_TELLING * self._timeout_s, _LONGEST_LEAVING_S)
        self._status_server.tell_departure(self._living(), self._rank, reason, limit_s)

    @property
    def is_anybody_gone(self) -> bool:
        """Whether a rank on this machine has died, or another rank has found somebody at fault. For any thread."""
        return bool(self._status_server.failure_report or self._dead())

    def close(self) -> None:
        """Give the process descriptors back."""
        while self._process_fds:
            _, fd = self._process_fds.popitem()
            if fd is not None:
                os.close(fd)

    def _network_failure(self) -> str:
        return next((failure for probe in self._network_probes if (failure := probe())), "")

    def _device_stall(self) -> Stall | None:
        return next((stall for probe in self._device_probes if (stall := probe())), None)

    def _dead(self) -> tuple[int, ...]:
        return tuple(filter(self._is_dead, self._peers))

    def _is_dead(self, rank: int) -> bool:
        if rank not in self._process_fds:
            return False  # on another machine; the network tells
        fd = self._process_fds[rank]
        if fd is None:
            return True
        poller = select.poll()
        poller.register(fd, select.POLLIN)
        return bool(poller.poll(0))

    def _gone(self) -> tuple[int, ...]:
        return tuple(rank for rank in self._peers if self._is_dead(rank) or rank in self._status_server.departures)

    def _describe_end(self, rank: int) -> str:
        if reason := self._status_server.departures.get(rank):
            return f"rank {rank} {reason}"
        return f"rank {rank} (pid {self._peers[rank].pid}) is dead"

    def _blame_the_departed(self, stall: Callable[[], Stall]) -> None:
        """Raise if what is waited for did not come from a rank before it left."""
        time.sleep(self._settling_s)
        waiting_for = stall()
        concerned = self._peers if waiting_for.is_for_own_device else waiting_for.on_ranks
        if not self._status_server.departures.keys().isdisjoint(concerned):
            gone = self._gone()
            self._blame(waiting_for, gone, "; ".join(map(self._describe_end, gone)), has_left=True)

    def _blame(self, stall: Stall, at_fault: tuple[int, ...], reason: str, *, has_left: bool) -> NoReturn:
        if not (failure_report := self._status_server.failure_report):  # another rank may have been quicker
            failure_report = FailureReport(at_fault, reason, self._rank, has_left)
            failure = self._failure(stall, failure_report)
            with beside(failure, "the other ranks could not be told"):
                self._tell(failure_report)
            self._status_server.failure_report = self._status_server.failure_report or failure_report
            raise failure
        raise self._failure(stall, failure_report)

    def _tell(self, failure_report: FailureReport) -> None:
        # Those at fault, too: a late or stopped rank should learn why nobody is there when it comes.
        self._status_server.tell(self._living(), failure_report, _TELLING * self._timeout_s)

    def _living(self) -> dict[int, StatusServerAddress]:
        return {rank: peer.address for rank, peer in self._peers.items() if not self._is_dead(rank)}

    def _failure(self, stall: Stall, failure_report: FailureReport) -> PeerFailureError:
        found = "" if failure_report.found_by == self._rank else f" (found by rank {failure_report.found_by})"
        return PeerFailureError(
            rank=self._rank,
            peers=failure_report.peers,
            operation=self._operation,
            has_left=failure_report.has_left,
            stall=stall,
            reason=failure_report.reason + found,
        )


def _open_process(pid: int) -> int | None:
    """A descriptor that becomes readable when the process ends, or ``None`` if it has ended."""
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    except OSError as error:
        raise TransportError(
            f"process {pid} of a rank on this machine cannot be watched: {reason_of(error)}"
        ) from error


def _describe_status(status: Status | None) -> str:
    if status is None:
        return "could not be asked what it does, as this process has no descriptor or memory left to ask"
    if not status.phase:
        return f"has been outside any fusco call for {status.seconds:.1f} s (last call: {status.operation or 'none'})"
    return f"is in {status.operation}, phase '{status.phase}', for {status.seconds:.1f} s"
