"""Every blocking wait of the host goes through here: its time limit, and looks at the peers meanwhile."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

from fusco.control.counters import Counters, CounterWait
from fusco.control.fault_finder import FaultFinder, Peer
from fusco.control.status_server import StatusServer
from fusco.control.transport import Network
from fusco.core.errors import ClosedError, Stall

_WAITING = 0.7  # share of the limit that a wait without progress takes
_DEVICE_GAVE_UP = "a wait of the device ended without what it waited for"

# Pauses grow to half a millisecond: ranks may share cores, so a wait must not spin for long.
_FIRST_PAUSE_S, _MAX_PAUSE_S = 20e-6, 500e-6
_SECONDS_BETWEEN_CHECKS = 0.02

_MAX_MOVING_S = 1.0  # after a failure, of a wait in which something still moves
_MAX_SETTLING_IN_CHECK_S = 0.02  # as a loop calls ``check`` after each step
# A death is noticed within this time, and the interpreter's switch interval of 5 ms.
_INTERVAL_S = 0.02
# A rank that leaves has completed its own calls, but others may still complete theirs.
_GRACE_AFTER_DEPARTURE_S = 1.0
_ENDING_S = 1.0  # longer than the thread needs, unless it is sending a report


class Watchdog(FaultFinder):
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
        """Watch the processes of ``peers`` on this machine; the rest as ``FaultFinder``.

        In each wait, limited to ``timeout_s``, this rank only yields its core for ``spin_s`` seconds before it sleeps.
        """
        super().__init__(rank, peers, status_server, timeout_s, numbers)
        self._spin_s = spin_s
        self._networks: list[Network] = []
        self._polled: list[Network] = []  # of these
        self._device_probes: list[Callable[[], Stall | None]] = []
        self._since_progress = self._last_check = time.monotonic()
        self._pause_s, self._counter_wait = _FIRST_PAUSE_S, CounterWait()
        # When this wait found a rank missing, since anything moved; and when this collective found a failure.
        self._since_loss = self._since_failure = math.inf
        self._interruption = ""

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
        return bool(sum(network.poll() for network in self._polled))

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
        self._collective, self._operation, self._since_failure = collective, operation, math.inf
        self._status_server.note(collective, operation, "start")

    def end(self) -> float:
        """Note that the collective has ended on this rank; return the time."""
        return self._status_server.note(self._collective, self._operation, "")

    def interrupt(self, reason: str) -> None:
        """Make all waits of this rank raise ``ClosedError``, the one under way first."""
        self._interruption = reason

    def progress(self) -> None:
        """Note that the wait has made progress, which restarts the limit."""
        self._since_progress, self._pause_s, self._since_loss = time.monotonic(), _FIRST_PAUSE_S, math.inf
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

    def pause(
        self,
        stall: Callable[[], Stall],
        counters: Counters | None = None,
        *,
        is_any: bool = False,
        may_spin: bool = True,
    ) -> None:
        """Sleep shortly for want of progress, or raise ``PeerFailureError`` once none can be expected.

        With ``counters`` no longer than until they have their values, or with ``is_any`` until one of them has.
        """
        if self._interruption:
            raise ClosedError(f"{self._operation} cannot go on: {self._interruption}")
        if self.poll():
            self.progress()
            return
        now = time.monotonic()
        spins = may_spin and now - self._since_progress < self._spin_s
        if counters is not None and (sockets := self._awaited_sockets()) is not None:
            wait = self._counter_wait
            (wait.spin if spins else wait.sleep)(counters, sockets, is_any=is_any)
        elif spins:
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
        return next((stall for probe in self._device_probes if (stall := probe())), None)

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


class Grace:
    """Time that ranks have for their last calls once one has left, as that one has completed its own; of one thread."""

    def __init__(self, watchdog: Watchdog) -> None:
        self._watchdog, self._departed_since = watchdog, 0.0

    @property
    def is_over(self) -> bool:
        """True if no rank has left, or the first a second ago, as far as this was asked."""
        if not self._watchdog.has_departed_rank:
            return True
        self._departed_since = self._departed_since or time.monotonic()
        return time.monotonic() - self._departed_since > _GRACE_AFTER_DEPARTURE_S


class PeerWatch:
    """Examines all ranks every 20 ms once it is started, and calls a function as soon as one is gone.

    The host may wait for a device by itself, and replays of a CUDA graph involve no host, so no call of ``Watchdog``
    would look. The thread calls nothing of CUDA, and so does not invalidate a capture of another thread.
    """

    def __init__(self, watchdog: Watchdog, on_loss: Callable[[], None]) -> None:
        """``on_loss`` is called once, in the thread."""
        self._watchdog, self._on_loss = watchdog, on_loss
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fusco-peer-watch", daemon=True)

    def start(self) -> None:
        """Start the thread, unless it has been started."""
        if self._thread.ident is None:
            self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._is_over.set()
        if self._thread.ident is not None:
            self._thread.join(_ENDING_S)

    def _run(self) -> None:
        is_lost = True  # also if this fails: without the thread, waits of the device would have no limit
        try:
            is_lost = self._finds_loss()
        finally:
            if is_lost:
                self._on_loss()
                self._watchdog.report_the_dead()

    def _finds_loss(self) -> bool:
        """Wait until a rank is gone; return False once this is closed."""
        watchdog, grace = self._watchdog, Grace(self._watchdog)
        while not self._is_over.wait(_INTERVAL_S):
            if grace.is_over and (watchdog.has_departed_rank or watchdog.has_failed_rank):
                return True
        return False
