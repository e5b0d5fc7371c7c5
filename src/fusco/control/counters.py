"""Waits for counters that other processes write and for sockets, in compiled code: a look at them costs little.

Where several ranks share a core, each look at what has arrived takes the others more than its instructions: Python and
PyTorch fill the caches anew. So a rank that waits stays in a loop of a few lines until there is something to do.
"""

from __future__ import annotations

import select
from typing import Any

import numpy as np
import numpy.typing as npt

from fusco.control.flags import load_acquire_at
from fusco.control.machine_calls import NUM_YIELD_WORDS, call_at, libc_address, yield_since, yield_words
from fusco.core.compiled import compiled

Counters = npt.NDArray[np.int64]  # (num_counters, 2): the address of each, and the value that it should reach

_NUM_SPINS = 100  # looks while the rank only yields its core, 60 us if nothing else runs there
_MAX_SLEEP_NS = 4_000_000  # in one call
_FIRST_PAUSE_NS, _MAX_PAUSE_NS = 20_000, 500_000

# Words of a wait: the address of ppoll, a pause as seconds and nanoseconds, one of no time, and those of a yield.
_PPOLL, _PAUSE, _PAUSE_NS, _NO_TIME, _YIELD = 0, 1, 2, 3, 5


def no_counters() -> Counters:
    """Return counters of a wait that only sockets end."""
    return np.empty((0, 2), np.int64)


def readable(fd: int) -> int:
    """Return the ``pollfd`` of a socket that is to have something to read, as one word."""
    return fd | select.POLLIN << 32


def writable(fd: int) -> int:
    """Return the ``pollfd`` of a socket that is to have room for writing, as one word."""
    return fd | select.POLLOUT << 32


class CounterWait:
    """Waits of one rank; pauses grow until ``restart`` is called."""

    def __init__(self) -> None:
        self._words = np.zeros(_YIELD + NUM_YIELD_WORDS, np.int64)
        self._words[_PPOLL], self._words[_YIELD:] = libc_address("ppoll"), yield_words()
        self.restart()

    def restart(self) -> None:
        """Begin with short pauses again."""
        self._words[_PAUSE_NS] = _FIRST_PAUSE_NS

    def spin(self, counters: Counters, sockets: list[int], *, is_any: bool) -> None:
        """Yield the core until the counters have the values, with ``is_any`` one of them, or a socket is ready.

        It yields shortly at most, some 20 ms on a core that others need. ``sockets`` are of ``readable`` and
        ``writable``.
        """
        _spin(counters, is_any, np.array(sockets, np.int64), self._words)

    def sleep(self, counters: Counters, sockets: list[int], *, is_any: bool) -> None:
        """Sleep as ``spin`` yields, for some milliseconds at most; a socket that becomes ready wakes this rank."""
        _sleep(counters, is_any, np.array(sockets, np.int64), self._words)


@compiled(nogil=True)
def _have_come(counters: Any, is_any: Any) -> bool:
    num_reached = 0
    for i in range(len(counters)):
        num_reached += load_acquire_at(counters[i, 0]) >= counters[i, 1]
    return num_reached > 0 if is_any else num_reached == len(counters)


@compiled(nogil=True)
def _spin(counters: Any, is_any: Any, sockets: Any, words: Any) -> None:
    since_ns = 0
    for _ in range(_NUM_SPINS):
        if _have_come(counters, is_any):
            return
        no_time = words[_NO_TIME:].ctypes.data
        if len(sockets) and call_at(words[_PPOLL], sockets.ctypes.data, len(sockets), no_time, 0, 0, 0) > 0:
            return
        since_ns = yield_since(words[_YIELD:], since_ns)
        if since_ns < 0:
            return


@compiled(nogil=True)
def _sleep(counters: Any, is_any: Any, sockets: Any, words: Any) -> None:
    num_ns = 0
    while num_ns < _MAX_SLEEP_NS and not _have_come(counters, is_any):
        pause = words[_PAUSE:].ctypes.data
        if call_at(words[_PPOLL], sockets.ctypes.data, len(sockets), pause, 0, 0, 0) > 0:
            return
        num_ns += words[_PAUSE_NS]
        words[_PAUSE_NS] = min(words[_PAUSE_NS] * 3 // 2, _MAX_PAUSE_NS)


def warm_up_counters() -> None:
    """Compile both waits, or read them from the disk cache."""
    wait, none = CounterWait(), np.zeros((0, 2), np.int64)
    wait.spin(none, [], is_any=False)
    wait.sleep(none, [], is_any=False)
