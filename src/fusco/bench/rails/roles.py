"""Roles of workers in benchmarks; every function runs in a worker's process."""

from __future__ import annotations

import mmap
import os
import random
import time
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from fusco.bench.rails.crew import Office
from fusco.rails import Request

_NUM_POSTED = 4  # receives that a sink has open
_FLOW_BYTES, _FLOW_DEPTH = 16 << 20, 3  # messages of a flow, and how many are under way
_BARRIER_S = 60.0
_STOP = b""  # a message without bytes ends a sink


def sink(office: Office, max_bytes: int = _FLOW_BYTES) -> int:
    """Receive messages of up to ``max_bytes`` until an empty one comes; return the bytes received."""
    link, buffer, total = office.channels[0], bytearray(max_bytes), 0
    posted = deque(link.irecv(buffer) for _ in range(_NUM_POSTED))
    while num_bytes := posted.popleft().wait():
        total += num_bytes
        posted.append(link.irecv(buffer))
    return total


def flow(office: Office, begin_s: float, seconds: float) -> float:
    """Send for ``seconds`` from ``begin_s`` (of time.monotonic) on as fast as possible; return the GB/s (1e9 bytes)."""
    link, memory = office.channels[0], bytes(_FLOW_BYTES)
    time.sleep(max(0.0, begin_s - time.monotonic()))
    begin, moved, last = time.monotonic(), 0, 0.0
    under_way = deque(link.isend(memory) for _ in range(_FLOW_DEPTH))
    while time.monotonic() < begin + seconds:
        oldest = under_way.popleft()
        oldest.wait()
        moved, last = moved + len(memory), oldest.finished_s
        under_way.append(link.isend(memory))
    for each in under_way:
        each.wait()
    link.isend(_STOP).wait()
    return moved / (last - begin) / 1e9


def stream(office: Office, begin_s: float, arrivals_s: Sequence[float], sizes: Sequence[int]) -> list[float]:
    """Send a message at each arrival (seconds after ``begin_s``); return seconds from its arrival to its delivery."""
    link, memory = office.channels[0], memoryview(bytes(max(sizes)))
    requests = []
    for arrival, size in zip(arrivals_s, sizes, strict=True):
        time.sleep(max(0.0, begin_s + arrival - time.monotonic()))
        requests.append(link.isend(memory[:size]))
    for request in requests:
        request.wait()
    link.isend(_STOP).wait()
    return [request.finished_s - begin_s - arrival for request, arrival in zip(requests, arrivals_s, strict=True)]


def exchange(
    office: Office, sizes: list[int], sizes_back: list[int], iterations: int, barrier: Path, index: int, count: int
) -> list[float]:
    """Send and receive on all channels, over and over; return the seconds of each iteration but the first.

    ``sizes`` are the bytes to send on each channel, ``sizes_back`` those that come back. By the file ``barrier`` all
    ``count`` workers, of which this one is ``index``, begin each iteration together.
    """
    memory, buffers = memoryview(bytes(max(sizes, default=0))), [bytearray(size) for size in sizes_back]
    times = []
    with Barrier(barrier, index, count) as together:
        for _ in range(iterations + 1):
            together.wait()
            begin = time.monotonic()
            requests = [each.irecv(buffer) for each, buffer in zip(office.channels, buffers, strict=True)]
            requests += [each.isend(memory[:size]) for each, size in zip(office.channels, sizes, strict=True)]
            for request in requests:
                request.wait()
            times.append(time.monotonic() - begin)
    return times[1:]


class Barrier(AbstractContextManager["Barrier"]):
    """A barrier of processes of one machine; each writes its own number in a shared file."""

    def __init__(self, path: Path, index: int, count: int) -> None:
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(fd, 8 * count)
        self._map, self._index, self._round = mmap.mmap(fd, 8 * count), index, 0
        self._numbers = memoryview(self._map).cast("Q")
        os.close(fd)

    def wait(self) -> None:
        """Wait for all processes to come here."""
        self._round += 1
        self._numbers[self._index] = self._round
        end = time.monotonic() + _BARRIER_S
        while min(self._numbers) < self._round:
            if time.monotonic() > end:
                raise TimeoutError(f"workers are in rounds {list(self._numbers)} after {_BARRIER_S:g} s")
            time.sleep(0.0002)

    def __exit__(self, *_error: object) -> None:
        self._numbers.release()
        self._map.close()


def checked_flow(office: Office, begin_s: float, seconds: float) -> int:
    """Send messages of changing content and size for ``seconds``; return their number."""
    link, contents = office.channels[0], Contents()
    time.sleep(max(0.0, begin_s - time.monotonic()))
    under_way, number = deque[Request](), 0
    while time.monotonic() < begin_s + seconds:
        under_way.append(link.isend(contents.message(number)))
        number += 1
        if len(under_way) == _FLOW_DEPTH:
            under_way.popleft().wait()
    for each in under_way:
        each.wait()
    link.isend(_STOP).wait()
    return number


def checked_sink(office: Office) -> list[tuple[float, int]]:
    """Receive what ``checked_flow`` sends; return time and bytes of each message; ``ValueError`` for a wrong one."""
    link, contents = office.channels[0], Contents()
    buffers = [bytearray(contents.MAX_BYTES) for _ in range(_NUM_POSTED)]
    posted = deque((link.irecv(buffer), buffer) for buffer in buffers)
    deliveries: list[tuple[float, int]] = []
    while True:
        request, buffer = posted.popleft()
        num_bytes = request.wait()
        if not num_bytes:
            return deliveries
        expected = contents.message(len(deliveries))
        if buffer[:num_bytes] != expected:  # of bytearrays, which is 20 times as fast as of memoryviews
            raise ValueError(f"message {len(deliveries)} of {len(expected)} bytes came as other {num_bytes} bytes")
        deliveries.append((request.finished_s, num_bytes))
        posted.append((link.irecv(buffer), buffer))


class Contents:
    """Messages by number, the same in every process."""

    MAX_BYTES = 6 << 20
    _PRIME = 7919

    def __init__(self) -> None:
        self._bytes = memoryview(random.Random(0).randbytes(2 * self.MAX_BYTES))  # noqa: S311  no secret

    def message(self, number: int) -> memoryview:
        """Return a message of 1 byte to ``MAX_BYTES``."""
        start = number * self._PRIME % self.MAX_BYTES
        size = 1 + number * self._PRIME**3 % self.MAX_BYTES
        return self._bytes[start : start + size]
