"""Counters in shared memory by which ranks of a node tell each other how far they are."""

from __future__ import annotations

from typing import Any

import numba
import torch

from fusco.control.atomics import load_acquire, store_release


@numba.njit(numba.int64(numba.int64[::1], numba.int64), cache=True)
def _load(counters: Any, index: int) -> Any:
    return load_acquire(counters, index)


@numba.njit(numba.void(numba.int64[::1], numba.int64, numba.int64), cache=True)
def _store(counters: Any, index: int, value: int) -> None:
    store_release(counters, index, value)


class Flags:
    """An int64 counter array with one writer for each counter.

    What a rank wrote to shared memory before it raises a counter is visible to whoever reads the new value.
    """

    def __init__(self, memory: torch.Tensor) -> None:
        self._counters = memory.view(torch.int64).numpy()

    def load(self, index: int) -> int:
        """Read a counter (acquire)."""
        return int(_load(self._counters, index))

    def store(self, index: int, value: int) -> None:
        """Write a counter (release); only its one writer may."""
        _store(self._counters, index, value)
