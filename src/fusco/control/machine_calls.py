"""Calls of C functions by their addresses, for compiled CPU code."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic


@intrinsic
def call_at(_typing: Any, address: Any, first: Any, second: Any, third: Any, fourth: Any) -> Any:  # noqa: ARG001  types
    """Call the function at an address with four int64 or pointers and return its int32.

    A function of fewer arguments ignores the others: the calling conventions of x86-64 and AArch64 pass all four in
    registers.
    """

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        word = context.get_value_type(types.int64)
        function = ir.FunctionType(context.get_value_type(types.int32), [word] * 4)
        return builder.call(builder.inttoptr(args[0], function.as_pointer()), args[1:])

    return types.int32(*[types.int64] * 5), generate


def address_of(function: Any) -> int:
    """Return the address of a function of ``ctypes``."""
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address, function
    return address


@lru_cache(maxsize=1)
def yield_address() -> int:
    """Return the address of ``sched_yield``, which lets other threads run on this core; it takes 0.3 us."""
    return address_of(ctypes.CDLL(None).sched_yield)
