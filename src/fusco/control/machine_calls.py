"""Calls of C functions by their addresses, for compiled CPU code."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from fusco.control.flags import load_acquire_at
from fusco.core.compiled import compiled

NUM_ARGUMENTS = 6  # that ``call_at`` passes
NUM_YIELD_WORDS = 4
_CLOCK_MONOTONIC = 1
_MAX_SPIN_NS = 20_000_000  # as the watchdog's time between looks for ranks that are gone


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


def yield_words() -> list[int]:
    """Return the words of ``yield_since``: addresses of functions, and room for a time."""
    return [libc_address("sched_yield"), libc_address("clock_gettime"), 0, 0]


@compiled(nogil=True)
def yield_since(words: Any, since_ns: Any) -> Any:
    """Let other threads run on this core, which takes 0.3 us without any, and milliseconds on a core that others need.

    ``since_ns`` is what this returned before, at first 0. Returns -1 when a spin should end, after 20 ms: until then
    its thread does not look for ranks that are gone.
    """
    call_at(words[0], 0, 0, 0, 0, 0, 0)
    time = words[2:].ctypes.data
    call_at(words[1], _CLOCK_MONOTONIC, time, 0, 0, 0, 0)
    now_ns = load_acquire_at(time) * 1_000_000_000 + load_acquire_at(time + 8)
    if since_ns == 0:
        return now_ns
    return since_ns if now_ns - since_ns < _MAX_SPIN_NS else -1
