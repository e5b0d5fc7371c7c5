"""Receives of a channel: where chunks go, and which messages are complete; without I/O."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from fusco.rails.request import Request
from fusco.rails.send_queue import num_chunks
from fusco.rails.wire import DATA, TOO_LARGE, Record, WireError


class _Incoming:
    """A receive that was posted and the chunks that have arrived; ``num_bytes`` is -1 before the first."""

    __slots__ = ("arrived", "memory", "num_bytes", "num_left", "request")

    def __init__(self, memory: memoryview, request: Request) -> None:
        self.memory, self.request = memory, request
        self.num_bytes, self.num_left = -1, -1
        self.arrived = bytearray()  # a byte for each chunk

    def begin(self, num_bytes: int, num_chunks: int) -> None:
        self.num_bytes, self.num_left, self.arrived = num_bytes, num_chunks, bytearray(num_chunks)

    def error(self) -> ValueError | None:
        if self.num_bytes <= len(self.memory):
            return None
        return ValueError(
            f"irecv #{self.request.seq} has a buffer of {len(self.memory):,} bytes, the message has {self.num_bytes:,}"
        )


class ReceiveQueue:
    """Receives in order. Their chunks arrive in any order; requests finish in theirs."""

    def __init__(self, peer_chunk_bytes: int) -> None:
        self._chunk_bytes = peer_chunk_bytes
        self._receives: deque[_Incoming] = deque()  # posted and not finished
        self._first = 0  # number of the first of them
        self.num_begun = 0  # of which something has arrived

    def post(self, memory: memoryview, request: Request) -> None:
        """Append a receive."""
        self._receives.append(_Incoming(memory, request))

    def target(self, record: Record) -> memoryview | None:
        """Return the memory for a record's payload, ``None`` if the chunk has arrived before.

        Asked again before each part of a payload is read: as soon as another rail has brought the chunk, the memory
        may belong to the caller again. Raises ``WireError`` if no peer sends such a record.
        """
        index, chunk = record.seq - self._first, record.slot
        if index < 0:
            return None
        if index >= len(self._receives):
            num_granted = self._first + len(self._receives)
            raise WireError(f"a chunk of message {record.seq} has come, but only {num_granted} were granted")
        incoming = self._receives[index]
        if incoming.num_bytes < 0:
            self._check_first(record, incoming)
        if record.size != incoming.num_bytes or chunk >= len(incoming.arrived):
            raise WireError(f"chunk {chunk} of a message of {record.size} bytes, which has {incoming.num_bytes}")
        if incoming.arrived[chunk]:
            return None
        start = chunk * self._chunk_bytes
        expected = 0 if record.kind == TOO_LARGE else min(self._chunk_bytes, incoming.num_bytes - start)
        if record.mask != expected:
            raise WireError(f"chunk {chunk} of message {record.seq} claims {record.mask} bytes instead of {expected}")
        return incoming.memory[start : start + expected]

    def arrived(self, record: Record) -> None:
        """Note that a chunk has arrived; finish the requests that are now complete, in order."""
        index = record.seq - self._first
        if index < 0 or self._receives[index].arrived[record.slot]:
            return
        incoming = self._receives[index]
        incoming.arrived[record.slot] = 1
        incoming.num_left -= 1
        while self._receives and not self._receives[0].num_left:
            self._first += 1
            self.num_begun -= 1
            finished = self._receives.popleft()
            finished.request.finish(finished.num_bytes, finished.error())

    def open_grants(self) -> Iterator[tuple[int, int]]:
        """Yield number and buffer bytes of the receives of which nothing has arrived."""
        for index, incoming in enumerate(self._receives):
            if incoming.num_bytes < 0:
                yield self._first + index, len(incoming.memory)

    @property
    def is_empty(self) -> bool:
        """True if all receives have finished."""
        return not self._receives

    def fail(self, error: BaseException) -> None:
        """Finish all requests with an error."""
        self._first += len(self._receives)
        self.num_begun = 0
        while self._receives:
            self._receives.popleft().request.finish(0, error)

    def _check_first(self, record: Record, incoming: _Incoming) -> None:
        """Take the size of a message from its first chunk."""
        self.num_begun += 1
        if record.kind == TOO_LARGE:
            if record.size <= len(incoming.memory):
                raise WireError(f"message {record.seq} of {record.size} bytes is said not to fit, but does")
            incoming.begin(record.size, 1)
            return
        if record.kind != DATA or record.size > len(incoming.memory):
            raise WireError(f"message {record.seq} has {record.size} bytes for a buffer of {len(incoming.memory)}")
        incoming.begin(record.size, num_chunks(record.size, self._chunk_bytes))
