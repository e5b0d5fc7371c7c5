"""Messages of a channel that are to be sent, as chunks; without I/O."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from fusco.rails.request import Request
from fusco.rails.wire import DATA, TOO_LARGE, Record, WireError, pack


class Outgoing:
    """A message and which of its chunks have been acknowledged."""

    __slots__ = ("_acked", "_is_too_large", "_memory", "num_left", "request")

    def __init__(self, memory: memoryview, request: Request) -> None:
        self._memory, self.request = memory, request
        self._is_too_large = False
        self._acked = bytearray()  # a byte for each chunk, from the grant on
        self.num_left = -1  # chunks not acknowledged; -1 before the grant

    def grant(self, size: int, chunk_bytes: int) -> None:
        """Take the peer's buffer of ``size`` bytes; without room, only that is sent."""
        self._is_too_large = size < len(self._memory)
        self.num_left = 1 if self._is_too_large else num_chunks(len(self._memory), chunk_bytes)
        self._acked = bytearray(self.num_left)

    @property
    def num_chunks(self) -> int:
        """Chunks of the message."""
        return len(self._acked)

    def is_acked(self, chunk: int) -> bool:
        """Return whether the peer has a chunk."""
        return bool(self._acked[chunk])

    def ack(self, chunk: int) -> bool:
        """Note that the peer has a chunk; return whether that completes the message."""
        if chunk >= len(self._acked):
            raise WireError(
                f"chunk {chunk} of message {self.request.seq} was acknowledged, which has {self.num_chunks}"
            )
        if not self._acked[chunk]:
            self._acked[chunk] = 1
            self.num_left -= 1
        return not self.num_left

    def frame(self, chunk: int, chunk_bytes: int) -> tuple[bytes, memoryview]:
        """Return the record of a chunk, and its payload."""
        kind = TOO_LARGE if self._is_too_large else DATA
        start = chunk * chunk_bytes
        payload = self._memory[:0] if self._is_too_large else self._memory[start : start + chunk_bytes]
        return pack(Record(self.request.seq, len(self._memory), chunk, len(payload), 0, kind)), payload

    def finish(self, error: BaseException | None = None) -> None:
        """Finish the request: sent, or too large for the peer's buffer."""
        if error is None and self._is_too_large:
            error = ValueError(
                f"isend #{self.request.seq} has {len(self._memory):,} bytes, more than the buffer of the peer's irecv"
            )
        self.request.finish(len(self._memory), error)


class SendQueue:
    """Messages in order. Chunks of a message may be sent once the peer has granted a buffer for it."""

    def __init__(self, chunk_bytes: int) -> None:
        self.chunk_bytes = chunk_bytes
        self._messages: dict[int, Outgoing] = {}  # not yet acknowledged
        self._early_grants: dict[int, int] = {}  # bytes of buffers for messages that are not here yet
        self._again: deque[tuple[int, int]] = deque()  # (seq, chunk) that were lost with their rail
        self._seq, self._chunk = 0, 0  # the next chunk that was never sent

    def add(self, memory: memoryview, request: Request) -> None:
        """Append a message."""
        message = self._messages[request.seq] = Outgoing(memory, request)
        if (size := self._early_grants.pop(request.seq, None)) is not None:
            message.grant(size, self.chunk_bytes)

    def grant(self, seq: int, size: int) -> None:
        """Take the grant of a buffer of ``size`` bytes for message ``seq``; repeated ones have no effect."""
        message = self._messages.get(seq)
        if message is not None and message.num_left < 0:
            message.grant(size, self.chunk_bytes)
        elif message is None and seq >= self._seq:
            self._early_grants[seq] = size

    @property
    def has_chunk(self) -> bool:
        """True if there is a chunk to send."""
        return bool(self._again) or ((message := self._messages.get(self._seq)) is not None and message.num_left >= 0)

    def pop(self) -> tuple[int, int] | None:
        """Return the next chunk to send as (seq, chunk), or ``None``; chunks that were lost come first."""
        while self._again:
            seq, chunk = self._again.popleft()
            if (lost := self._messages.get(seq)) is not None and not lost.is_acked(chunk):
                return seq, chunk
        message = self._messages.get(self._seq)
        if message is None or message.num_left < 0:
            return None
        popped = (self._seq, self._chunk)
        self._chunk += 1
        if self._chunk == message.num_chunks:
            self._seq, self._chunk = self._seq + 1, 0
        return popped

    def frame(self, seq: int, chunk: int) -> tuple[bytes, memoryview]:
        """Return the record of a chunk that was popped, and its payload."""
        return self._messages[seq].frame(chunk, self.chunk_bytes)

    def put_back(self, chunks: Iterable[tuple[int, int]]) -> None:
        """Send chunks, (seq, chunk) each, again: their rail has failed, and the peer may not have them."""
        self._again.extend(chunks)

    def ack(self, seq: int, chunk: int) -> None:
        """Note that the peer has a chunk; finish the request of a message that it has completely."""
        message = self._messages.get(seq)
        if message is None:
            return  # acknowledged before, when it was sent over another rail
        if message.ack(chunk):
            del self._messages[seq]
            message.finish()

    def fail(self, error: BaseException) -> None:
        """Finish all requests with an error."""
        for message in self._messages.values():
            message.finish(error)
        self._messages.clear()
        self._again.clear()

    @property
    def is_empty(self) -> bool:
        """True if the peer has acknowledged all messages."""
        return not self._messages


def num_chunks(num_bytes: int, chunk_bytes: int) -> int:
    """Return the chunks of a message: at least one, so that an empty message arrives, too.

    >>> num_chunks(0, 4), num_chunks(8, 4), num_chunks(9, 4)
    (1, 2, 3)
    """
    return max(1, -(-num_bytes // chunk_bytes))
