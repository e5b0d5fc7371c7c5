"""Calls of C functions by their addresses, for compiled CPU code."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

NUM_ARGUMENTS = 6  # that ``call_at`` passes


@intrinsic
def call_at(_typing: Any, address: Any, a: Any, b: Any, c: Any, d: Any, e: Any, f: Any) -> Any:  # noqa: ARG001  types
    """Call the function at an address with six int64 or pointers and return its int32, or the low half of its int64.

    A function of fewer arguments ignores the others: the calling conventions of x86-64 and AArch64 pass all six in
    registers.
    """

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        word = context.get_value_type(types.int64)
        function = ir.FunctionType(context.get_value_type(types.int32), [word] * NUM_ARGUMENTS)
        return builder.call(builder.inttoptr(args[0], function.as_pointer()), args[1:])

    return types.int32(*[types.int64] * (1 + NUM_ARGUMENTS)), generate


def address_of(function: Any) -> int:
    """Return the address of a function of ``ctypes``."""
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address, function
    return address


@lru_cache(maxsize=16)
def libc_address(name: str) -> int:
    """Return the address of a function of the C library."""
    return address_of(getattr(ctypes.CDLL(None), name))


def yield_address() -> int:
    """Return the address of ``sched_yield``, which lets other threads run on this core; it takes 0.3 us."""
    return libc_address("sched_yield")
