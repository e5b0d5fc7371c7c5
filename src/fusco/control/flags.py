"""Counters in shared memory by which ranks of a node announce their progress; acquire and release for compiled code."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from numba import types
from numba.extending import intrinsic

from fusco.core.compiled import compiled


@compiled()
def _load(address: int) -> Any:
    return load_acquire_at(address)


@compiled()
def _store(address: int, value: int) -> None:
    store_release_at(address, value)


def warm_up_flags() -> None:
    """Compile the load and the store, or read them from the disk cache."""
    flags = Flags(torch.zeros(1, dtype=torch.int64, device="cpu"))
    flags.store(0, flags.load(0))


class Flags:
    """An array of int64 counters with one writer each.

    What a rank wrote to shared memory before it raises a counter is visible to every rank that reads the new value.
    """

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory, self._first = memory, memory.data_ptr()

    def load(self, index: int) -> int:
        """Read a counter (acquire)."""
        return int(_load(self._first + 8 * index))

    def store(self, index: int, value: int) -> None:
        """Write a counter (release); only its writer may."""
        _store(self._first + 8 * index, value)

    def writer(self, index: int) -> Callable[[int], None]:
        """Return a function that writes one counter, as ``store``, but more quickly."""
        write = partial(_store, self._first + 8 * index)
        vars(write)["memory"] = self._memory  # kept mapped, although a signal handler may close it just before a call
        return write


@intrinsic
def load_acquire_at(_typing: Any, address: Any) -> Any:
    """Read an int64 that another process writes with ``store_release_at``; its earlier writes are visible then."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], context.get_value_type(types.int64).as_pointer())
        return builder.load_atomic(pointer, "acquire", 8)

    return types.int64(types.int64), generate


@intrinsic
def store_release_at(_typing: Any, address: Any, value: Any) -> Any:
    """Write an int64 that another process reads with ``load_acquire_at``."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], context.get_value_type(types.int64).as_pointer())
        builder.store_atomic(args[1], pointer, "release", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate
