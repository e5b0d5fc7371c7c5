"""Progress of the messages that CUDA graphs replay, which no host launches: two words in host memory."""

from __future__ import annotations

import ctypes
import time

import torch

from fusco.core.errors import Stall
from fusco.cuda.gpu import Gpu
from fusco.cuda.kernels.abi import pinned

_IS_WAITING, _IS_OLD = range(2)


class ReplayedMessages:
    """Words that the device writes before and after messages of a graph, and one thread of the host reads.

    The device sets the first word before the messages, and clears both after them. The reader sets the second one, so
    it sees whether any messages have completed since it last looked.
    """

    def __init__(self, gpu: Gpu) -> None:
        self._gpu, device = gpu, gpu.device
        self._memory = pinned(torch.zeros(2, dtype=torch.int32, device="cpu"), device)
        self._waiting, self._done = (torch.full((n,), 2 - n, dtype=torch.int32, device=device) for n in (1, 2))
        self._words = (ctypes.c_int32 * 2).from_address(self._memory.data_ptr())
        self._peers: set[int] = set()
        self._since = 0.0

    @property
    def are_captured(self) -> bool:
        """True once messages were captured: a graph may replay them at any time."""
        return bool(self._peers)

    def begin(self, stream: torch.cuda.Stream, peers: tuple[int, ...]) -> None:
        """Capture the beginning of messages with some ranks."""
        self._peers.update(peers)
        with self._gpu.on(stream):
            self._memory[:1].copy_(self._waiting, non_blocking=True)

    def end(self, stream: torch.cuda.Stream) -> None:
        """Capture the end of messages."""
        with self._gpu.on(stream):
            self._memory.copy_(self._done, non_blocking=True)

    @property
    def are_waiting(self) -> bool:
        """True while the device waits for messages of a graph."""
        return bool(self._words[_IS_WAITING])

    def wait_s(self) -> float:
        """Return how long none of them have completed although the device waits for some; for one thread."""
        now = time.monotonic()
        if not (self._words[_IS_WAITING] and self._words[_IS_OLD]):
            self._since, self._words[_IS_OLD] = now, 1
        return now - self._since

    def stall(self) -> Stall:
        """Return the wait for all ranks that messages of graphs come from."""
        return Stall("the network", tuple(sorted(self._peers)), "messages of a replayed graph", "not all of them")
