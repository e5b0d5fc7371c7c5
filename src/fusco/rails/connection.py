"""One connection of a channel over one rail. It never blocks; it belongs to the endpoint's thread."""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from fusco.rails.wire import DATA, RECORD_BYTES, TOO_LARGE, Record, WireError, pack, unpack

_READ_BUDGET = 4 << 20  # bytes read before other connections get their turn
_SCRATCH_BYTES = 256 * 1024  # for payloads that have arrived before
_SO_PRIORITY, _SO_BINDTODEVICE = 12, 25
# Lower effort (RFC 3662): class CS1 in the packets, for the switches and for queueing disciplines that look there, and
# the lowest band of those that go by the socket's priority. Any process may choose both.
_LOW_TOS, _LOW_PRIORITY = 0x20, 2
_LATE, _AVERAGED_OVER = 4, 8
_NO_LINGER = struct.pack("ii", 1, 0)
_UNACKED, _BYTES_ACKED = struct.Struct("@24xI"), struct.Struct("@120xQ")  # of struct tcp_info


@dataclass(slots=True)
class Posted:
    """A chunk that was given to a connection: its bytes, when, and whether it was found to be late."""

    num_bytes: int
    at_s: float
    is_late: bool = False


class Connection:
    """A connection of one rail: credits and chunks out, records and payloads in.

    Attributes:
        rail: its rail.
        incarnation: counts the connections of this channel and rail.
        outstanding: the chunks, (seq, chunk), that were given to it and not acknowledged.
        typical_s: how long an acknowledgement takes, a moving average.
        wants_write: whether it waits for room in the socket's buffer.
    """

    def __init__(self, connected: socket.socket, rail: int, incarnation: int) -> None:
        self.socket, self.rail, self.incarnation = connected, rail, incarnation
        self.outstanding: dict[tuple[int, int], Posted] = {}
        self.typical_s = 0.0
        self.wants_write = False
        self._out: list[memoryview] = []  # the rest of what is being written: credits, or one chunk
        self._credits = bytearray()
        self._chunks: deque[tuple[bytes, memoryview]] = deque()
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
        self._chunks.append(frame)

    def has(self, name: tuple[int, int]) -> bool:
        """Return whether a chunk is outstanding here; its time begins anew, so it may become late again."""
        posted = self.outstanding.get(name)
        if posted is not None:
            posted.at_s, posted.is_late = time.monotonic(), False
        return posted is not None

    def acknowledged(self, name: tuple[int, int]) -> int:
        """Take a chunk from those outstanding and return its bytes; ``WireError`` if it is none of them."""
        posted = self.outstanding.pop(name, None)
        if posted is None:
            raise WireError(f"chunk {name[1]} of message {name[0]} was acknowledged, but not sent")
        taken_s = time.monotonic() - posted.at_s
        if posted.is_late:  # once is no rule, but where all are late, that is typical
            self.typical_s = min(taken_s, 1.5 * self.typical_s + 0.001)
        else:
            self.typical_s += (taken_s - self.typical_s) / _AVERAGED_OVER
        return posted.num_bytes

    def late_chunks(self, now: float, least_s: float) -> list[tuple[int, int]]:
        """Return the chunks that have become late since the last call: after several times what is typical.

        Args:
            now: seconds.
            least_s: chunks are not late before.
        """
        limit_s = max(least_s, _LATE * self.typical_s)
        late = [name for name, each in self.outstanding.items() if not each.is_late and now - each.at_s > limit_s]
        for name in late:
            self.outstanding[name].is_late = True
        return late

    @property
    def has_output(self) -> bool:
        """True if something was not written yet."""
        return bool(self._out or self._credits or self._chunks)

    def write(self) -> None:
        """Write what the socket takes; raises ``OSError`` if the connection has failed."""
        while self.has_output:
            if not self._out:
                if self._credits:
                    self._out = [memoryview(bytes(self._credits))]
                    self._credits.clear()
                else:
                    header, payload = self._chunks.popleft()
                    self._out = [memoryview(header), payload]
            try:
                num_sent = self.socket.sendmsg(self._out, (), socket.MSG_NOSIGNAL)
            except BlockingIOError:
                break
            while self._out and num_sent >= len(self._out[0]):
                num_sent -= len(self._out.pop(0))
            if self._out:
                self._out[0] = self._out[0][num_sent:]
        self.wants_write = self.has_output

    def read(
        self, target: Callable[[Record], memoryview | None], take: Callable[[Connection, Record, bool], None]
    ) -> bool:
        """Read what has come; return whether payload was among it.

        Args:
            target: gives the memory for a payload, ``None`` if it is not wanted any more.
            take: is called with this connection, each record once its payload is complete, and whether its payload
                was wanted.

        Raises:
            OSError: if the connection has failed or was closed.
            WireError: for records that no peer sends.
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
        """Take a complete header."""
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
