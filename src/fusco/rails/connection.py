"""One connection of a channel over one rail. It never blocks; it belongs to the endpoint's thread."""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from fusco.rails.wire import DATA, RECORD_BYTES, TOO_LARGE, Record, WireError, pack, unpack

_READ_BUDGET = 4 << 20  # bytes read before other connections get their turn
_SCRATCH_BYTES = 256 * 1024  # for payloads that have arrived before
_SO_PRIORITY, _SO_BINDTODEVICE, _SIOCOUTQ = 12, 25, 0x5411
# Lower effort (RFC 3662): class CS1 in the packets, for the switches and for queueing disciplines that look there, and
# the lowest band of those that go by the socket's priority. Any process may choose both.
_LOW_TOS, _LOW_PRIORITY = 0x20, 2
# Of the socket's buffer. Credits wait behind it, so it is short; but it feeds the rail while the core is busy.
_MAX_UNSENT_BYTES = 256 * 1024
_LATE, _AVERAGED_OVER = 4, 8
_NO_LINGER = struct.pack("ii", 1, 0)
_UNSENT = struct.Struct("i")
_UNACKED, _BYTES_ACKED = struct.Struct("@24xI"), struct.Struct("@120xQ")  # of struct tcp_info


@dataclass(slots=True)
class Posted:
    """A chunk that was given to a connection."""

    num_bytes: int  # its bytes
    at_s: float  # when
    is_late: bool = False  # whether it was found to be late
    has_begun: bool = False  # whether it is being written, or was
    has_passed: bool = False  # whether it has left the network: the kernel of the peer has it, or the peer


class Connection:
    """A connection of one rail: credits and chunks out, records and payloads in."""

    def __init__(self, connected: socket.socket, rail: int, incarnation: int) -> None:
        """Take a socket; ``incarnation`` counts the connections of this channel and rail."""
        self.socket, self.rail, self.incarnation = connected, rail, incarnation
        self.outstanding: dict[tuple[int, int], Posted] = {}  # by (seq, chunk), until the peer acknowledges them
        self.typical_s = 0.0  # how long a chunk is on the network, a moving average
        self.wants_write, self.num_bytes = False, 0  # waits for room in the socket's buffer; bytes written and read
        self._out: list[memoryview] = []  # the rest of what is being written: credits, or one chunk
        self._credits, self._writes_credits = bytearray(), False
        self._chunks: deque[tuple[tuple[int, int], bytes, memoryview]] = deque()
        self._begun: deque[tuple[int, Posted]] = deque()  # chunks on the network, with the bytes written at their ends
        self._num_written = 0
        self._header, self._num_header = memoryview(bytearray(RECORD_BYTES)), 0
        self._record, self._num_payload = Record(), -1  # being read; -1: a header is
        self._scratch = memoryview(bytearray(0))
        self._progress = (0, 0.0)  # bytes acknowledged, and when that number last changed

    def send_credit(self, record: Record) -> None:
        """Append a record; it overtakes chunks that have not begun."""
        self._credits += pack(record)

    def send_chunk(self, name: tuple[int, int], frame: tuple[bytes, memoryview]) -> None:
        """Append a chunk, named by (seq, chunk)."""
        self.outstanding[name] = Posted(len(frame[1]), time.monotonic())
        self._chunks.append((name, *frame))

    def withdraw(self) -> dict[tuple[int, int], Posted]:
        """Take back the chunks of which nothing was written, and return them."""
        withdrawn = {name: self.outstanding.pop(name) for name, _, _ in self._chunks}
        self._chunks.clear()
        return withdrawn

    def has(self, name: tuple[int, int]) -> bool:
        """Return whether a chunk is outstanding here; its time begins anew, so it may become late again."""
        posted = self.outstanding.get(name)
        if posted is not None:
            posted.at_s, posted.is_late = time.monotonic(), False
        return posted is not None

    def acknowledged(self, name: tuple[int, int]) -> Posted | None:
        """Take a chunk from those outstanding, and return it unless it has passed before.

        Raises ``WireError`` if it is not one of them.
        """
        posted = self.outstanding.get(name)
        if posted is None or not posted.has_begun:
            raise WireError(f"chunk {name[1]} of message {name[0]} was acknowledged, but not sent")
        del self.outstanding[name]
        if posted.has_passed:
            return None
        self._note_passed(posted)
        return posted

    def passed(self) -> list[Posted]:
        """Return the chunks that have left the network since the last call, and were not acknowledged before.

        The peer may read them later, when it has time. They can delay nothing else on the rail any more.
        """
        if not self._begun:
            return []
        num_delivered = self._num_written - _UNSENT.unpack(fcntl.ioctl(self.socket, _SIOCOUTQ, bytes(4)))[0]
        passed = []
        while self._begun and self._begun[0][0] <= num_delivered:
            posted = self._begun.popleft()[1]
            if not posted.has_passed:
                self._note_passed(posted)
                passed.append(posted)
        return passed

    def _note_passed(self, posted: Posted) -> None:
        taken_s, posted.has_passed = time.monotonic() - posted.at_s, True
        if posted.is_late:  # once is no rule, but where all are late, that is typical
            self.typical_s = min(taken_s, 1.5 * self.typical_s + 0.001)
        else:
            self.typical_s += (taken_s - self.typical_s) / _AVERAGED_OVER

    def late_chunks(self, now: float, least_s: float) -> list[tuple[int, int]]:
        """Return the chunks that have become late since the last call: after several times what is typical.

        That is after ``least_s`` at the earliest. A chunk that has passed is not late, although the peer may be busy.
        """
        limit_s = max(least_s, _LATE * self.typical_s)
        late = [
            name
            for name, each in self.outstanding.items()
            if not (each.is_late or each.has_passed) and now - each.at_s > limit_s
        ]
        for name in late:
            self.outstanding[name].is_late = True
        return late

    @property
    def has_output(self) -> bool:
        """True if something was not written yet."""
        return bool(self._out or self._credits or self._chunks)

    @property
    def is_delivered(self) -> bool:
        """True if the peer's kernel has everything; closing earlier could discard it."""
        return not self.has_output and not _UNSENT.unpack(fcntl.ioctl(self.socket, _SIOCOUTQ, bytes(4)))[0]

    @property
    def owes_credits(self) -> bool:
        """True if a credit was not written yet."""
        return bool(self._credits) or self._writes_credits

    def write(self) -> None:
        """Write what the socket takes; raises ``OSError`` if the connection has failed."""
        while self.has_output:
            if not self._out:
                self._writes_credits = bool(self._credits)
                if self._credits:
                    self._out = [memoryview(bytes(self._credits))]
                    self._credits.clear()
                else:
                    name, header, payload = self._chunks.popleft()
                    self._out = [memoryview(header), payload]
                    posted = self.outstanding[name]
                    posted.has_begun = True
                    self._begun.append((self._num_written + len(header) + len(payload), posted))
            try:
                num_sent = self.socket.sendmsg(self._out, (), socket.MSG_NOSIGNAL)
            except BlockingIOError:
                break
            self.num_bytes += num_sent
            self._num_written += num_sent
            while self._out and num_sent >= len(self._out[0]):
                num_sent -= len(self._out.pop(0))
            if self._out:
                self._out[0] = self._out[0][num_sent:]
        self._writes_credits = self._writes_credits and bool(self._out)
        self.wants_write = self.has_output

    def read(
        self, target: Callable[[Record], memoryview | None], take: Callable[[Connection, Record, bool], None]
    ) -> bool:
        """Read what has come; return whether payload was among it.

        ``target`` gives the memory for a payload, ``None`` if it is not wanted any more. ``take`` is called with this
        connection, each record once its payload is complete, and whether its payload was wanted. Raises ``OSError`` if
        the connection has failed or was closed, ``WireError`` for records that no peer sends.
        """
        budget, has_payload = _READ_BUDGET, False
        while budget > 0:
            wanted = target(self._record) if self._num_payload >= 0 else None
            memory = self._header[self._num_header :] if self._num_payload < 0 else self._rest_of(wanted)
            try:
                num_read = self.socket.recv_into(memory) if len(memory) else 0
            except BlockingIOError:
                return has_payload
            if len(memory) and not num_read:
                raise ConnectionResetError("the peer closed it")
            budget -= num_read
            self.num_bytes += num_read
            if self._num_payload < 0:
                self._num_header += num_read
                if self._num_header == RECORD_BYTES:
                    self._begin(take)
            else:
                has_payload = True
                self._num_payload += num_read
                if self._num_payload == self._record.mask:
                    self._num_payload = -1
                    take(self, self._record, wanted is not None)
            if num_read < len(memory):
                break  # the socket is empty
        return has_payload

    def _begin(self, take: Callable[[Connection, Record, bool], None]) -> None:
        self._num_header = 0
        record = unpack(self._header)
        if record.kind in (DATA, TOO_LARGE):
            self._record, self._num_payload = record, 0
        else:
            take(self, record, True)  # noqa: FBT003  a credit is always wanted

    def _rest_of(self, wanted: memoryview | None) -> memoryview:
        if wanted is not None:
            return wanted[self._num_payload :]
        if not self._scratch:
            self._scratch = memoryview(bytearray(_SCRATCH_BYTES))
        return self._scratch[: self._record.mask - self._num_payload]

    def is_stalled(self, now: float, stall_s: float) -> bool:
        """Return whether the peer's kernel has acknowledged nothing for ``stall_s`` although bytes are on their way.

        A peer that does not read closes its window, which is no failure of the rail.
        """
        info = self.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 128)
        (unacked,), (num_acked,) = _UNACKED.unpack_from(info), _BYTES_ACKED.unpack_from(info)
        if not unacked or num_acked != self._progress[0]:
            self._progress = (num_acked, now)
        return now - self._progress[1] > stall_s

    def release(self) -> None:
        """Drop chunks that have not begun and copy the rest of one that has: their memory is the caller's again."""
        self._chunks.clear()
        self._out = [memoryview(bytes(part)) for part in self._out]

    def abort(self) -> None:
        """Close the connection at once; the peer's end is reset."""
        with contextlib.suppress(OSError):
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
        self.socket.close()


def configure(connecting: socket.socket, *, defers: bool) -> None:
    """Set the options of a connection; one that ``defers`` asks for a lower network priority."""
    connecting.settimeout(0)
    connecting.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connecting.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _MAX_UNSENT_BYTES)
    if defers:
        is_ipv6 = connecting.family == socket.AF_INET6
        level, option = (socket.IPPROTO_IPV6, socket.IPV6_TCLASS) if is_ipv6 else (socket.IPPROTO_IP, socket.IP_TOS)
        connecting.setsockopt(level, option, _LOW_TOS)  # before the priority, which it changes, too
        connecting.setsockopt(socket.SOL_SOCKET, _SO_PRIORITY, _LOW_PRIORITY)


def bind_to(connecting: socket.socket, interface: str, address: str) -> None:
    """Bind a socket to a rail, so that its bytes leave by it wherever routes lead; raises ``OSError``."""
    with contextlib.suppress(PermissionError):  # kernels before 5.7 without CAP_NET_RAW: routes decide
        connecting.setsockopt(socket.SOL_SOCKET, _SO_BINDTODEVICE, interface.encode())
    connecting.bind((address, 0))
