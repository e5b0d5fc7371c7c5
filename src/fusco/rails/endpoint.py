"""An endpoint: a worker's access to all rails of its host."""

from __future__ import annotations

import queue
import secrets
import socket
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from fusco.core.errors import ClosedError, TransportError, reason_of
from fusco.rails.acceptor import Acceptor
from fusco.rails.address import Address
from fusco.rails.board import Board
from fusco.rails.board_row import BoardRow
from fusco.rails.channel import CLOSING_S, Channel
from fusco.rails.connection import Connection
from fusco.rails.dialer import Dialer
from fusco.rails.handshake import CHANNEL_BYTES, SECRET_BYTES, EndpointInfo
from fusco.rails.host import Host
from fusco.rails.limits import Limits
from fusco.rails.loop import Loop
from fusco.rails.monitor import ActivityMonitor, CompletionMonitor, Monitor
from fusco.rails.rail import Rail, check_rails, has_link
from fusco.rails.schedule import Policy, policy_named

_CHECK_S, _IDLE_CHECK_S = 0.05, 0.25  # between looks at links and stalls, with and without requests
_RETRY_S = 0.001  # between looks for an idle rail
_RESCUE_S = 0.002  # between looks for chunks on borrowed rails that are late, or whose owners send
_BOARD_S = 0.25  # between looks for dead workers
_SPREAD_S = 0.25  # after the first rail of a new channel, the others get this long before `connect` returns


class Endpoint:
    """A worker's access to the rails of its host. It has one thread; ``close`` it, or use it in ``with``.

    Attributes:
        worker: this worker's number on its host.
        rails: the rails of this host.
        limits: bounds of the scheduler.
    """

    def __init__(
        self,
        *,
        worker: int,
        rails: Sequence[Rail],
        policy: str | Policy = "fuselink",
        limits: Limits | None = None,
        timeout_s: float = 60.0,
        board: Path | None = None,
        is_polled: bool = False,
    ) -> None:
        """Register the worker on the host's board and start the thread.

        Args:
            worker: this worker's number on its host; it must own a rail.
            rails: the rails of this host, in the order that all hosts have: rail i is connected to rail i.
            policy: a name of ``POLICIES``, or one of your own making.
            limits: bounds of the scheduler.
            timeout_s: the limit of every wait.
            board: the file of the board; by default that of this user and network namespace.
            is_polled: start no thread: everything happens in ``poll`` and in the other methods, in one thread of the
                caller, which must not wait for requests otherwise.

        Raises:
            ValueError: if the worker owns no rail, or for rails or a policy that cannot be.
            SharedMemoryError: if the board cannot be used.
            TransportError: without descriptors or threads left.
        """
        self.worker, self.rails, self.limits = worker, check_rails(rails), limits or Limits()
        direct = sum(1 << i for i, rail in enumerate(self.rails) if worker in rail.owners)
        if not direct:
            owners = ", ".join(f"{rail.interface}: {rail.owners}" for rail in self.rails)
            raise ValueError(f"worker {worker} owns none of the rails; their owners are {owners}")
        chosen = policy if isinstance(policy, Policy) else policy_named(policy)
        self._timeout_s = timeout_s
        self._channels: dict[bytes, Channel] = {}
        self._dialers: dict[bytes, Dialer] = {}
        self._ended: set[bytes] = set()  # names of channels that peers may not join again
        self._accepted: queue.SimpleQueue[Channel] = queue.SimpleQueue()
        self._acceptor: Acceptor | None = None
        self._address: Address | None = None
        self._error: Exception | None = None
        self._next_check = self._next_board_check = self._next_rescue = 0.0
        self._checked_s, self._clock_s = time.monotonic(), 0.0
        rest_s = max(0.0, self.limits.hold_s - self.limits.release_s)
        with ExitStack() as undo:
            self._board = Board(board)
            undo.callback(self._board.close)
            self._row = row = BoardRow(self._board, worker, direct, self.rails, rest_s)
            undo.callback(row.close)
            try:
                self._query = undo.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
                self._loop = loop = Loop(self._step, self._fail)
                undo.callback(loop.close)
                monitor = self._new_monitor(chosen)
                self._host = Host(worker, self.rails, direct, self.limits, chosen, row, monitor, timeout_s, loop)
                if not is_polled:
                    loop.start(f"fusco-rails-{worker}")
            except OSError as error:
                raise TransportError(f"worker {worker} cannot use rails: {reason_of(error)}") from error
            except RuntimeError as error:  # no thread could be started
                raise TransportError(f"worker {worker} cannot use rails: {error}") from error
            undo.pop_all()

    def poll(self) -> None:
        """Progress all channels without waiting; for endpoints without a thread."""
        self._loop.poll()

    def listen(self) -> Address:
        """Listen on all rails and return the address, which peers pass to ``connect``; raises ``TransportError``."""
        self._check_open()
        if self._address is None:
            secret = secrets.token_bytes(SECRET_BYTES)
            self._acceptor = Acceptor(self._host, secret, self._join)
            self._address = Address(self.worker, self.limits.chunk_bytes, self._acceptor.names, secret)
            self._loop.post(self._acceptor.start)
        return self._address

    def accept(self, timeout_s: float | None = None) -> Channel:
        """Return the next channel that a peer has connected, after ``listen``.

        Raises ``TransportError`` if there is none within the limit, by default that of the endpoint.
        """
        self._check_open()
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        try:
            return self._accepted.get(timeout=limit_s)
        except queue.Empty:
            self._check_open()
            raise TransportError(f"worker {self.worker}: no peer has connected within {limit_s:g} s") from None

    def connect(self, address: Address, timeout_s: float | None = None) -> Channel:
        """Connect to an endpoint over all rails that both hosts have, and return the channel.

        Raises ``PeerFailureError`` if no rail connects within the limit, by default that of the endpoint. Rails that
        come later are used from then on.
        """
        self._check_open()
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        channel = self.dial(address, secrets.token_bytes(CHANNEL_BYTES))
        end = time.monotonic() + limit_s
        while len(channel.rails) < channel.num_rails and time.monotonic() < end:
            if channel.rails:
                end = min(end, time.monotonic() + _SPREAD_S)
            if self._loop.wait(channel.closed, _RETRY_S):
                break
        channel.check_connected(limit_s)
        return channel

    def dial(self, address: Address, name: bytes) -> Channel:
        """Begin to connect a channel of a name, 16 bytes, and return it at once; its rails follow."""
        peer = EndpointInfo(address.worker, len(address.rails), address.chunk_bytes)
        channel = Channel(self._host, peer, name)
        self._loop.post(lambda: self._add(channel, Dialer(self._host, channel, address)))
        return channel

    def channel(self, name: bytes) -> Channel | None:
        """Return the channel of a name, dialled here or by a peer; ``None`` while there is none."""
        return self._channels.get(name)

    @property
    def num_refused(self) -> int:
        """Connections that were refused: foreign, replayed or late."""
        return self._acceptor.num_refused if self._acceptor else 0

    def close(self) -> None:
        """Close all channels and leave the board; requests that are not done fail. May be called again."""
        closing, end = list(self._channels.values()), time.monotonic() + CLOSING_S
        for channel in closing:
            channel.begin_close()
        for channel in closing:
            self._loop.wait(channel.closed, max(0.0, end - time.monotonic()))
        if self._query.fileno() < 0:
            return
        self._error = self._error or ClosedError(f"the endpoint of worker {self.worker} was closed")
        self._loop.close()
        if self._acceptor:
            self._acceptor.close()
        for dialer in self._dialers.values():
            dialer.close()
        self._query.close()
        self._row.close()
        self._board.close()

    def __enter__(self) -> Endpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # What follows is for the endpoint's thread.

    def _step(self, now: float) -> float:
        """Do what is due; return the seconds until something is due again."""
        if now >= self._next_check:
            self._check(now)
        wait_s = max(0.0, self._next_check - now)
        if rescues := now >= self._next_rescue:
            self._next_rescue = now + _RESCUE_S
        for channel in list(self._channels.values()):
            if not channel.is_idle:
                wait_s = min(wait_s, self._next_rescue - now)
                if rescues and channel.borrows:
                    channel.rescue(now)
            if channel.is_closing:
                channel.end_close()
                wait_s = min(wait_s, _RETRY_S)
            if channel.waits_for_rail:
                channel.pump()
                wait_s = min(wait_s, _RETRY_S if channel.waits_for_rail else wait_s)
        return wait_s

    def _check(self, now: float) -> None:
        """Look at links, stalled connections, rails to connect again, and dead workers of this host."""
        links = sum(1 << i for i, rail in enumerate(self.rails) if has_link(self._query, rail.interface))
        is_busy = False
        # Limits of failures count the time in which this end looked. One that is polled may pause, and then must look
        # at what has come meanwhile before it gives anything up.
        self._clock_s += min(now - self._checked_s, _IDLE_CHECK_S)
        self._checked_s = now
        for name, channel in list(self._channels.items()):
            channel.check(self._clock_s, links)
            if (dialer := self._dialers.get(name)) is not None and channel.redials:
                dialer.check(self._clock_s, links)
            if channel.closed.is_set():
                self._remove(channel)
            is_busy = is_busy or not channel.is_idle or not channel.is_complete
        if self._acceptor:
            self._acceptor.check(now)
        if now >= self._next_board_check:
            self._next_board_check = now + _BOARD_S
            self._board.reset_dead()
        self._next_check = now + (_CHECK_S if is_busy else _IDLE_CHECK_S)

    def _add(self, channel: Channel, dialer: Dialer | None = None) -> None:
        self._channels[channel.name] = channel
        self._next_check = 0.0
        if dialer is not None:
            self._dialers[channel.name] = dialer

    def _remove(self, channel: Channel) -> None:
        del self._channels[channel.name]
        if (dialer := self._dialers.pop(channel.name, None)) is not None:
            dialer.close()
        else:
            self._ended.add(channel.name)

    def _join(self, connection: Connection, peer: EndpointInfo) -> None:
        """Add a connection that a peer has made to its channel, which is new with the first."""
        if peer.channel in self._ended:
            connection.abort()
            return
        channel = self._channels.get(peer.channel)
        if channel is None:
            channel = Channel(self._host, peer, peer.channel)
            self._add(channel)
            channel.attach(connection)
            self._accepted.put(channel)
        elif connection.rail < channel.num_rails:
            channel.attach(connection)
        else:
            connection.abort()

    def _fail(self, error: Exception) -> None:
        """Fail all requests: the thread has ended with an error."""
        if isinstance(error, OSError):
            error = TransportError(f"worker {self.worker} cannot use rails any more: {reason_of(error)}")
        self._error = error
        for channel in self._channels.values():
            channel.fail(error)

    def _check_open(self) -> None:
        if self._error is not None:
            raise self._error

    def _new_monitor(self, policy: Policy) -> Monitor:
        limits, speeds = self.limits, [rail.bits_per_s for rail in self.rails]
        if policy.monitor == "completion":
            return CompletionMonitor(self._board, self._row.row, len(speeds), limits.hold_s)
        return ActivityMonitor(self._board, self._row.row, speeds, limits.hold_s, limits.chunk_bytes)
