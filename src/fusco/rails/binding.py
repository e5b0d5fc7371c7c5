"""The engine of rails, C sources that are compiled when first used; its structures and functions for ctypes."""

from __future__ import annotations

import atexit
import ctypes
import errno
import os
from collections.abc import Callable, Sequence
from ctypes import (
    POINTER,
    c_bool,
    c_char,
    c_char_p,
    c_double,
    c_int,
    c_int64,
    c_size_t,
    c_uint8,
    c_uint32,
    c_uint64,
    c_void_p,
)
from functools import cache
from pathlib import Path
from typing import Any

from fusco.core.c_library import compile_c, load, sources_of
from fusco.core.cache import CacheFolder
from fusco.core.errors import SharedMemoryError, TransportError, reason_of
from fusco.rails.policy import Limits, Policy, policy_named
from fusco.rails.rail import MAX_RAILS, Rail

NAME_BYTES, SECRET_BYTES = 16, 32  # of a channel's name, and of an address's secret
#: Flags of the compiler; tests append those of sanitizers.
FLAGS: list[str] = []
_WHY_BYTES = 1536
TOO_LARGE, CLOSED, LOST, LEFT, _ENDPOINT_FAILED, FORKED = range(1, 7)  # results of requests, and errors of channels


class Config(ctypes.Structure):
    """``struct config``: texts."""

    _fields_ = tuple(
        (name, c_char_p) for name in ("worker", "rails", "limits", "policy", "timeout_s", "threads", "board")
    )


class Progress(ctypes.Structure):
    """``struct progress``, with which an endpoint begins."""

    _fields_ = (("num_bytes", c_uint64), ("num_done", c_uint32), ("num_refused", c_uint32), ("changes", c_uint32))


class ChannelState(ctypes.Structure):
    """The first fields of ``struct channel``."""

    _fields_ = (
        *(("usable", c_uint32), ("error", c_int), ("is_closed", c_uint32), ("peer", c_int), ("num_rails", c_int)),
        *(("num_seen", c_int), ("num_bytes", c_uint64), ("num_owed", c_uint64)),
        *(("name", c_char * NAME_BYTES), ("reason", c_char * 2048)),
    )


class LimitsState(ctypes.Structure):
    """``struct limits``."""

    _fields_ = (
        *((name, c_int) for name in ("chunk_bytes", "direct_first", "direct_depth", "borrowed_per_rail", "batch")),
        *((name, c_double) for name in ("refresh_s", "hold_s", "release_s", "stall_s", "no_rail_s")),
    )


class RequestState(ctypes.Structure):
    """``struct request``; it must stay where it is until it is done."""

    _fields_ = (
        *(("next", c_void_p), ("data", c_void_p), ("size", c_uint64), ("num_bytes", c_uint64), ("seq", c_uint64)),
        *(("finished_ns", c_int64), ("state", c_uint32), ("result", c_int), ("is_receive", c_uint32)),
        *(("notifies", c_uint32), ("chunks", c_void_p), ("of_the_loop", c_uint32 * 4)),
    )


class Peer(ctypes.Structure):
    """``struct peer``."""

    _fields_ = (
        *(("worker", c_int), ("num_rails", c_int), ("chunk_bytes", c_uint32), ("ports", c_int * MAX_RAILS)),
        *(("addresses", c_char_p * MAX_RAILS), ("secret", c_uint8 * SECRET_BYTES)),
    )


class NamedRail(ctypes.Structure):
    """``struct named_rail``: interface, of at most 15 bytes, and speed in bit/s; 0 if unknown."""

    _fields_ = (("interface", c_char * 16), ("bits_per_s", c_uint64))


_FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "open": (c_void_p, (POINTER(Config), c_bool, c_char_p)),
    "close": (None, (c_void_p,)),
    "stop": (None, ()),
    "poll": (c_int64, (c_void_p,)),
    "fileno": (c_int, (c_void_p,)),
    "wait": (c_bool, (c_void_p, c_uint32, c_int64)),
    "listen": (c_void_p, (c_void_p, c_char_p, POINTER(c_int), c_char_p)),
    "accept": (c_void_p, (c_void_p, c_void_p)),
    "dial": (c_void_p, (c_void_p, POINTER(Peer), c_char_p)),
    "post": (c_int, (c_void_p, POINTER(RequestState))),
    "acquire": (c_uint32, (c_void_p,)),
    "wait_for": (c_bool, (POINTER(RequestState), c_int64)),
    "close_channel": (None, (c_void_p,)),
    "release": (None, (c_void_p,)),
    "give_up": (None, (c_void_p, c_char_p)),
    "board_open": (c_void_p, (c_char_p, c_double, c_char_p)),
    "board_close": (None, (c_void_p,)),
    "board_follow": (c_bool, (c_void_p, c_char_p)),
    "board_register": (c_bool, (c_void_p, c_int, c_uint32, POINTER(NamedRail), c_int, c_double, c_char_p)),
    "board_leave": (None, (c_void_p,)),
    "board_reset_dead": (None, (c_void_p,)),
    "choose": (c_int, (c_void_p, c_int, c_void_p)),
    "scheduler": (c_void_p, (c_void_p,)),
    "scheduler_next": (c_int, (c_void_p,)),
    "scheduler_completed": (None, (c_void_p, c_int, c_size_t)),
    "scheduler_credit": (None, (c_void_p, c_uint32, c_uint32)),
    "scheduler_idle": (c_uint32, (c_void_p,)),
}


def library_path(folder: CacheFolder | None = None, flags: Sequence[str] = ()) -> Path:
    """Return the compiled engine; see ``compile_c``, also for errors."""
    return compile_c("libfusco-rails", sources_of("libfusco-rails"), [*FLAGS, *flags], folder)


@cache
def functions() -> dict[str, Callable[..., Any]]:
    """Return the functions of the engine by name; ``CompileError`` if it cannot be compiled or loaded.

    They release the interpreter's lock. Those that can fail take a buffer as the last argument; see ``ask``.
    """
    library, found = load(library_path()), {}
    for name, (result, arguments) in _FUNCTIONS.items():
        found[name] = function = getattr(library, f"rails_{name}")
        function.restype, function.argtypes = result, arguments
    atexit.register(found["stop"])  # threads of the engine write into memory of this interpreter
    return found


def acquire(structure: ctypes.Structure, field: str) -> int:
    """Return an atomic field of the engine's; what the engine wrote before it is seen after this call."""
    return int(functions()["acquire"](ctypes.addressof(structure) + getattr(type(structure), field).offset))


def ask(name: str, *arguments: Any) -> Any:
    """Call a function of the engine that can fail; ``SharedMemoryError`` or ``TransportError`` if it does."""
    why = ctypes.create_string_buffer(_WHY_BYTES)
    if result := functions()[name](*arguments, why):
        return result
    text = why.value.decode(errors="replace")
    for code in (errno.EMFILE, errno.ENFILE):
        text = text.replace(os.strerror(code), reason_of(OSError(code, os.strerror(code))))
    raise (SharedMemoryError if "board of rails" in text else TransportError)(text)


def texts_of(
    worker: int | None,
    rails: Sequence[Rail],
    policy: str | Policy,
    limits: Limits,
    timeout_s: float,
    board: Path | None,
) -> dict[str, str]:
    """Return a configuration of the engine, by field of ``Config``.

    Raises ``ValueError`` for limits that it lacks, and for the name of no policy.
    """
    if (most := max(limits.direct_depth, limits.borrowed_per_rail)) > _MAX_DEPTH:
        raise ValueError(f"at most {_MAX_DEPTH} chunks may be outstanding on a rail, the limits say {most}")
    texts = {
        "worker": worker,
        "rails": ";".join(map(_describe, rails)),
        "limits": ",".join(f"{name}={value}" for name, value in vars(limits).items()),
        "policy": (policy if isinstance(policy, Policy) else policy_named(policy)).to_text(),
        "timeout_s": min(timeout_s, _LONGEST_S),
        "board": board,
    }
    return {name: str(value) for name, value in texts.items() if value is not None}


_MAX_DEPTH, _LONGEST_S = 32, 1e8


def _describe(rail: Rail) -> str:
    return ",".join((rail.interface, rail.address, str(rail.bits_per_s), "+".join(map(str, rail.owners))))
