"""A channel: messages between two workers over all rails of their hosts, in order."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from typing import Any

from fusco.core.errors import ClosedError, PeerFailureError
from fusco.rails.buffers import as_bytes
from fusco.rails.connection import Connection
from fusco.rails.handshake import EndpointInfo
from fusco.rails.host import Host
from fusco.rails.loop import READ, WRITE
from fusco.rails.rail_failures import RailFailures
from fusco.rails.receive_queue import ReceiveQueue
from fusco.rails.request import Request
from fusco.rails.schedule import WAIT, rails_of
from fusco.rails.scheduler import Credits, Scheduler
from fusco.rails.send_queue import SendQueue
from fusco.rails.wire import ACK, BYE, DATA, GRANT, RAIL_DOWN, TOO_LARGE, Record, WireError

CLOSING_S = 3.0  # what is left to deliver must pass rails that may have failed


class Channel:
    """Messages to and from one worker of another host. Any thread may post; message i goes into receive i.

    Attributes:
        peer: the worker at the other end, as numbered on its host.
        name: names the channel at both ends.
        num_rails: rails that both hosts have.
    """

    def __init__(self, host: Host, peer: EndpointInfo, name: bytes) -> None:
        self._host, self.name = host, name
        self.peer = peer.worker
        self.num_rails = min(len(host.rails), peer.num_rails)
        self._connections: dict[int, Connection] = {}  # by rail
        self._failures = RailFailures(host.worker, self.peer, host.rails[: self.num_rails], self._connections)
        self._scheduler = Scheduler(
            host.row, host.monitor, host.policy, host.limits, direct=host.direct, num_rails=self.num_rails
        )
        self._sends = SendQueue(host.limits.chunk_bytes)
        self._receives = ReceiveQueue(peer.chunk_bytes)
        self._next_send, self._next_receive = 0, 0
        self._posting = threading.Lock()
        self._credits = Credits(host)
        self._without_rail_since: float | None = None
        self._error: Exception | None = None
        self._peer_said_bye = self._is_closing = self._was_connected = False
        self.closed = threading.Event()

    def isend(self, buffer: Any, on_done: Callable[[BaseException | None], None] | None = None) -> Request:
        """Send a buffer or a contiguous CPU tensor; its memory must not change until the request is done.

        ``on_done`` is then called in the endpoint's thread, with the error if there is one. If it raises, the endpoint
        fails.

        Raises:
            TypeError, ValueError: for anything else.
            ClosedError: if the channel was closed.
        """
        memory = as_bytes(buffer, writable=False)
        for rail in rails_of(self._host.direct):
            self._host.row.announce(rail)
        with self._posting:
            request = self._new_request("isend", self._next_send, on_done)
            self._next_send += 1
            self._host.loop.post(lambda: self._begin(memory, request))
        return request

    def irecv(self, buffer: Any, on_done: Callable[[BaseException | None], None] | None = None) -> Request:
        """Receive the next message into a writable buffer or contiguous CPU tensor, which may be larger than it.

        ``wait`` returns the bytes of the message. ``on_done`` and errors as of ``isend``.
        """
        memory = as_bytes(buffer, writable=True)
        with self._posting:
            request = self._new_request("irecv", self._next_receive, on_done)
            self._next_receive += 1
            self._host.loop.post(lambda: self._begin(memory, request))
        return request

    @property
    def rails(self) -> tuple[int, ...]:
        """The rails that are connected now."""
        return rails_of(self.usable)

    def close(self) -> None:
        """Close the channel; requests that are not done fail, here and at the peer. May be called again."""
        if not self.closed.is_set():
            self.begin_close()
            self._host.loop.wait(self.closed, CLOSING_S)

    def begin_close(self) -> None:
        """Begin to close the channel; ``closed`` is set once the peer is notified."""
        self._host.loop.post(self._begin_close)

    def check_connected(self, limit_s: float) -> None:
        """Raise ``PeerFailureError`` unless a rail is connected, after a wait of ``limit_s`` seconds."""
        if not self.usable:
            reason = f"no rail to worker {self.peer} was connected within {limit_s:g} s: {self._failures}"
            self.close()
            raise self._error if isinstance(self._error, PeerFailureError) else self._failures.error(reason)

    # What follows is for the endpoint's thread.

    @property
    def usable(self) -> int:
        """Mask of the rails that are connected now."""
        return self._scheduler.view.usable

    @property
    def error(self) -> Exception | None:
        """The error of the channel; ``None`` while it works."""
        return self._error

    @property
    def num_bytes(self) -> int:
        """Bytes written to and read from the rails that are connected now."""
        return sum(connection.num_bytes for connection in self._connections.values())

    @property
    def owes_credits(self) -> bool:
        """True if the peer waits for an acknowledgement or a grant that was not written yet."""
        return any(connection.owes_credits for connection in self._connections.values())

    @property
    def redials(self) -> bool:
        """True unless one of the two ends has closed the channel."""
        return self._error is None and not self._peer_said_bye

    def attach(self, connection: Connection) -> None:
        """Use a connection; it replaces an earlier one of its rail."""
        rail = connection.rail
        if (old := self._connections.get(rail)) is not None:
            self.drop(old, "the peer has connected again")
        if self._error is not None:
            connection.abort()
            return
        self._connections[rail] = connection
        self._scheduler.view.usable |= 1 << rail
        self._without_rail_since, self._was_connected = None, True
        self._watch(connection)
        if len(self._connections) == 1:
            self._grant_again()
        self.pump()

    def drop(self, connection: Connection, reason: str, *, tells_peer: bool = True) -> None:
        """Give a connection up: what it had is sent over the other rails."""
        rail = connection.rail
        if self._connections.get(rail) is not connection:
            return
        del self._connections[rail]
        self._failures.note(rail, reason)
        self._scheduler.view.usable &= ~(1 << rail)
        self._end(connection)
        self._sends.put_back(connection.outstanding)
        if self._peer_said_bye and not self._connections:
            self.fail(self._failures.error(f"worker {self.peer} has closed its channel", has_left=True))
            return
        if tells_peer:
            for other in self._connections.values():
                other.send_credit(Record(slot=rail, epoch=connection.incarnation, kind=RAIL_DOWN))
        self._grant_again()
        self.pump()

    def pump(self) -> None:
        """Give chunks to rails as long as the scheduler finds one, and write what there is."""
        choose, sends = self._scheduler.choose, self._sends
        if sends.has_chunk:
            self._count_passed()
        while sends.has_chunk and self._connections:
            rail = choose()
            if rail == WAIT:
                break
            name = sends.pop()
            if name is None:  # what was left to send again has been acknowledged meanwhile
                self._scheduler.completed(rail, 0)
                break
            connection = self._connections[rail]
            if connection.has(name):  # it is late, but no other rail has room for a copy
                self._scheduler.completed(rail, 0)
                continue
            connection.send_chunk(name, sends.frame(*name))
        for connection in list(self._connections.values()):
            if connection.has_output and not connection.wants_write:
                self.on_writable(connection)

    def on_writable(self, connection: Connection) -> None:
        """Write to a connection; give it up if that fails."""
        wanted = connection.wants_write
        try:
            connection.write()
        except OSError as error:
            self._read_rest(connection)
            self.drop(connection, error.strerror or str(error))
            return
        if connection.wants_write != wanted:
            self._watch(connection)

    def on_readable(self, connection: Connection) -> None:
        """Read from a connection; give it up if that fails."""
        try:
            if connection.read(self._receives.target, self._take) and self._host.direct >> connection.rail & 1:
                self._host.row.receiving(connection.rail, rests=not self._receives.num_begun)
        except (OSError, WireError) as error:
            self.drop(connection, getattr(error, "strerror", None) or str(error))
        self.pump()

    def _read_rest(self, connection: Connection) -> None:
        """Take what came before a connection failed: acknowledgements, and word that the peer has left."""
        with contextlib.suppress(OSError, WireError):
            while connection.read(self._receives.target, self._take):
                pass

    def rescue(self, now: float) -> None:
        """Take back chunks from borrowed rails whose owners have begun to send, and send those again that are late.

        Until the owner pauses, they wait in the lower class. Of a late chunk, the copy that arrives first counts.
        """
        self._count_passed()
        busy = self._scheduler.busy()
        for rail, connection in self._connections.items():
            if connection.outstanding and self._host.defers(rail):
                if busy >> rail & 1:
                    withdrawn = connection.withdraw()
                    self._sends.put_back(name for name, posted in withdrawn.items() if not posted.is_late)
                    for _ in withdrawn:
                        self._scheduler.completed(rail, 0)
                self._sends.put_back(connection.late_chunks(now, self._host.least_late_s(rail)))

    @property
    def borrows(self) -> bool:
        """True if chunks of this channel are on borrowed rails in a lower class."""
        return self._host.policy.defers and any(
            connection.outstanding and self._host.defers(rail) for rail, connection in self._connections.items()
        )

    @property
    def waits_for_rail(self) -> bool:
        """True if chunks could be sent, were there a rail for them."""
        return self._sends.has_chunk and bool(self._connections)

    @property
    def is_idle(self) -> bool:
        """True if no request is under way."""
        return self._sends.is_empty and self._receives.is_empty

    @property
    def is_complete(self) -> bool:
        """True if all rails are connected."""
        return len(self._connections) == self.num_rails

    def check(self, now: float, links: int) -> None:
        """Give up connections whose rail has no link or is stalled, and the channel once it was without any too long.

        ``connect`` has a limit for the first connection. ``links`` is the mask of the rails that have a link.
        """
        for connection in list(self._connections.values()):
            if not links >> connection.rail & 1:
                self.drop(connection, "the interface has no link")
            elif connection.is_stalled(now, self._host.limits.stall_s):
                self.drop(connection, f"the peer acknowledged nothing for {self._host.limits.stall_s:g} s")
        if self._connections or self._error is not None or not self._was_connected:
            return
        if self._without_rail_since is None:
            self._without_rail_since = now
        if now - self._without_rail_since > self._host.limits.no_rail_s:
            self.peer_is_gone("no rail is left")

    def peer_is_gone(self, reason: str) -> None:
        """Break the channel: the peer cannot be reached."""
        self.fail(self._failures.error(f"worker {self.peer} is unreachable, {reason}: {self._failures}"))

    def note_failure(self, rail: int, reason: str) -> None:
        """Note why a rail could not be connected."""
        self._failures.note(rail, reason)

    def _begin_close(self) -> None:
        """Tell the peer, and fail what is not done; ``end_close`` follows once it has that."""
        self._fail_requests(ClosedError("the channel was closed"))
        self._is_closing = True
        for connection in list(self._connections.values()):
            connection.release()
            connection.send_credit(Record(kind=BYE))
        self.pump()
        self.end_close()

    @property
    def is_closing(self) -> bool:
        """True from the beginning to the end of ``close``; the peer is being notified."""
        return self._is_closing and not self.closed.is_set()

    def end_close(self) -> None:
        """Close the connections whose bytes have all been delivered; ``closed`` is set when there are none."""
        for rail, connection in list(self._connections.items()):
            if connection.is_delivered:
                del self._connections[rail]
                self._end(connection, aborts=False)
        if not self._connections:
            self.closed.set()

    def fail(self, error: Exception) -> None:
        """Break the channel: all requests fail, all connections end."""
        self._fail_requests(error)
        for rail, connection in list(self._connections.items()):
            del self._connections[rail]
            self._end(connection)
        self._scheduler.view.usable = 0
        self.closed.set()

    def _count_passed(self) -> None:
        """Take chunks that have left the network from the counts of their rails."""
        for rail, connection in self._connections.items():
            for posted in connection.passed():
                self._scheduler.completed(rail, posted.num_bytes)

    def _watch(self, connection: Connection) -> None:
        def on_event(events: int) -> None:
            if events & WRITE:
                self.on_writable(connection)
            if events & ~WRITE and self._connections.get(connection.rail) is connection:
                self.on_readable(connection)

        self._host.loop.watch(connection.socket.fileno(), READ | WRITE if connection.wants_write else READ, on_event)

    def _end(self, connection: Connection, *, aborts: bool = True) -> None:
        """Close a connection and take its chunks from the rail's count."""
        self._host.loop.forget(connection.socket.fileno())
        connection.abort() if aborts else connection.socket.close()
        for posted in connection.outstanding.values():
            if not posted.has_passed:
                self._scheduler.completed(connection.rail, 0)

    def _fail_requests(self, error: Exception) -> None:
        self._error = self._error or error
        self._sends.fail(self._error)
        self._receives.fail(self._error)

    def _new_request(self, verb: str, seq: int, on_done: Callable[[BaseException | None], None] | None) -> Request:
        if self._error is not None:
            raise self._error
        if os.getpid() != self._host.row.pid:
            raise ClosedError("the channel belongs to the process that this one was forked from")
        return Request(verb, seq, self._host.timeout_s, self._timed_out, on_done)

    def _begin(self, memory: memoryview, request: Request) -> None:
        if self._error is not None:
            request.finish(0, self._error)
        elif request.verb == "isend":
            self._sends.add(memory, request)
            self.pump()
        else:
            self._receives.post(memory, request)
            if self._connections:
                self._grant(request.seq, len(memory))
                self.pump()

    def _grant_again(self) -> None:
        """Grant all open receives: earlier grants may have been lost. Repeated ones have no effect."""
        if self._connections:
            for seq, num_bytes in self._receives.open_grants():
                self._grant(seq, num_bytes)

    def _grant(self, seq: int, num_bytes: int) -> None:
        connection = min(self._connections.values(), key=lambda each: each.has_output)
        connection.send_credit(self._credits.make(GRANT, seq, num_bytes))

    def _take(self, connection: Connection, record: Record, was_wanted: bool) -> None:  # noqa: FBT001  a callback
        kind, rail = record.kind, connection.rail
        if kind in (DATA, TOO_LARGE):
            connection.send_credit(self._credits.make(ACK, record.seq, record.size, record.slot))
            if was_wanted:
                self._host.row.received(rail, record.mask)
                self._receives.arrived(record)
        elif kind == ACK:
            self._scheduler.credit(record.mask, record.epoch)
            if (posted := connection.acknowledged((record.seq, record.slot))) is not None:
                self._scheduler.completed(rail, posted.num_bytes)
            self._sends.ack(record.seq, record.slot)
        elif kind == GRANT:
            self._scheduler.credit(record.mask, record.epoch)
            self._sends.grant(record.seq, record.size)
        elif kind == RAIL_DOWN:
            failed = self._connections.get(record.slot)
            if failed is not None and failed is not connection and failed.incarnation == record.epoch:
                self.drop(failed, "the peer says that it has failed", tells_peer=False)
        else:
            self._peer_said_bye = True
            raise ConnectionResetError("the peer has closed the channel")

    def _timed_out(self, request: Request, limit_s: float) -> BaseException:
        """Break the channel and return the error of a request that was waited for too long."""
        reason = f"worker {self.peer} did not take part within {limit_s:g} s; {self._failures}"
        error = self._failures.error(reason, request)
        self._host.loop.post(lambda: self.fail(error))
        self._host.loop.wait(self.closed, CLOSING_S)  # until then bytes may arrive in the caller's memory
        return error
