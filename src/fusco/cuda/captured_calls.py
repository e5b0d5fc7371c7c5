"""Calls that CUDA graphs have captured: which of these graphs live, and what replays read once members have changed.

Within a node, kernels wait for other ranks only by flags in peer-visible memory, and ask a word of it which ranks are
absent. So what was captured goes on among the ranks that are left, in the memory that it was captured with, which is
kept as long as such a graph lives. What is launched later uses the memory of the members of then.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from dataclasses import dataclass

from fusco.control.machine_calls import libc_address
from fusco.core.current_stream import capture_number
from fusco.core.errors import Stall
from fusco.core.threads import leak
from fusco.core.topology import Topology
from fusco.cuda.failure import stall_of
from fusco.cuda.gpu import Gpu
from fusco.cuda.memory.arena import Arena

_SEMAPHORE_BYTES = 32  # of glibc on 64 bits; all zero is a semaphore of value 0
_DELETION_S = 1.0  # for the driver to delete a graph, in a thread of its own


class LiveGraphs:
    """Counts the CUDA graphs that have captured calls of an engine and are not deleted."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu, self._captures = gpu, set[int]()
        self._ended = (ctypes.c_uint8 * _SEMAPHORE_BYTES)()
        self._value_of = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)(libc_address("sem_getvalue"))

    def note(self) -> None:
        """Note that a call is captured on the current stream."""
        if (number := capture_number()) not in self._captures:
            if not self._captures:
                leak(self._ended)  # which the driver may post when this is gone
            self._gpu.post_after_graph(ctypes.addressof(self._ended))
            self._captures.add(number)

    @property
    def count(self) -> int:
        """The number of those that live."""
        if not self._captures:
            return 0
        num_ended = ctypes.c_int()
        self._value_of(ctypes.addressof(self._ended), ctypes.addressof(num_ended))
        return len(self._captures) - num_ended.value

    def count_soon(self) -> int:
        """Return the number of those that live once those that were let go of are deleted."""
        if self.count:
            self._gpu.collect_garbage()
        deadline = time.monotonic() + _DELETION_S
        while self.count and time.monotonic() < deadline:
            time.sleep(1e-3)
        return self.count


@dataclass(frozen=True)
class CapturedCalls:
    """What graphs read that have captured calls of earlier members of a node; they go on among those that are left."""

    arena: Arena
    graphs: LiveGraphs
    pending_error: Callable[[], Exception | None]  # of plans into static rows

    def go_on_among(self, topology: Topology) -> None:
        """Prepare replays among the members that are left; see ``Arena.begin_again``."""
        numbers = enumerate(self._numbers)
        self.arena.begin_again(sum(1 << local for local, number in numbers if number not in topology.numbers))

    def stall(self, topology: Topology) -> Stall | None:
        """Return the wait of a replay that has ended early, of a rank of this topology; ``None`` if none has."""
        if not self.arena.has_failed:
            return None
        present = {number: rank for rank, number in enumerate(topology.numbers)}
        return stall_of(self.arena.failure, [present.get(number, -1) for number in self._numbers])

    @property
    def _numbers(self) -> list[int]:
        """The number in the group of each rank of the node."""
        numbers = self.arena.layout.topology.numbers
        return [numbers[rank] for rank in self.arena.node_ranks]
