"""Atomic loads and stores of int64 in memory that processes share, for compiled CPU code."""

from __future__ import annotations

from typing import Any

from numba import types
from numba.extending import intrinsic


def element_pointer(context: Any, builder: Any, array_type: Any, array: Any, index: Any) -> Any:
    """Return an LLVM pointer to ``array[index]`` of a one-dimensional array."""
    data = context.make_array(array_type)(context, builder, array).data
    return builder.gep(data, [index])


@intrinsic
def load_acquire(_typing: Any, array: Any, index: Any) -> Any:
    """Read an int64 that another process writes with ``store_release``; its earlier writes are visible afterwards."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = element_pointer(context, builder, signature.args[0], args[0], args[1])
        return builder.load_atomic(pointer, "acquire", 8)

    return types.int64(array, types.int64), generate


@intrinsic
def store_release(_typing: Any, array: Any, index: Any, value: Any) -> Any:
    """Write an int64 that another process reads with ``load_acquire``."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = element_pointer(context, builder, signature.args[0], args[0], args[1])
        builder.store_atomic(args[2], pointer, "release", 8)
        return context.get_dummy_value()

    return types.void(array, types.int64, types.int64), generate


@intrinsic
def load_acquire_at(_typing: Any, address: Any) -> Any:
    """Read an int64 at an address, as ``load_acquire``."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], context.get_value_type(types.int64).as_pointer())
        return builder.load_atomic(pointer, "acquire", 8)

    return types.int64(types.int64), generate


@intrinsic
def store_release_at(_typing: Any, address: Any, value: Any) -> Any:
    """Write an int64 at an address, as ``store_release``."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], context.get_value_type(types.int64).as_pointer())
        builder.store_atomic(args[1], pointer, "release", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate
