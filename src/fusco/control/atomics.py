"""Atomic loads and stores of int64 in memory that processes share, for compiled CPU code."""

from __future__ import annotations

from typing import Any

from numba import types
from numba.extending import intrinsic


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
