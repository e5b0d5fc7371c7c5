"""Wrapper of ``mover.c``: the thread that copies chunks over all links it may use now."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from fusco.core.c_library import load_c_library, sources_of
from fusco.core.errors import ThreadError
from fusco.offload.driver import DriverTable
from fusco.rails.binding import LimitsState
from fusco.rails.board import Board
from fusco.rails.policy import Limits
from fusco.rails.rail import MAX_RAILS

MAX_SLOTS = 64  # chunks of a path that may be under way
QUEUED, STARTED, ISSUED, DONE, FAILED = range(5)  # states of a job
TO_HOST, FROM_HOST = 0, 1  # directions; rail 2 k + direction is one of link k
_LONGEST_S = 1e9  # of a wait: nanoseconds are counted in 64 bits


class Options(ctypes.Structure):
    """The struct ``Options`` of ``mover.c``."""

    _fields_ = (
        ("limits", LimitsState),
        ("kernel", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("num_blocks", "relays_by_kernel", "own_link_by_kernel")),
    )

    @classmethod
    def of(cls, limits: Limits) -> Options:
        """Return the options that limits say, with copy engines."""
        return cls(LimitsState(**vars(limits)))


class PathStreams(ctypes.Structure):
    """The struct ``Streams`` of ``mover.c``: streams, events and relay buffers of a path."""

    _fields_ = (
        ("buffer", ctypes.c_uint64),
        ("num_slots", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("first_context", "first_stream", "last_context", "last_stream")),
        ("first_events", ctypes.c_void_p * MAX_SLOTS),
        ("last_events", ctypes.c_void_p * MAX_SLOTS),
    )


class Job(ctypes.Structure):
    """The struct ``Job`` of ``mover.c``; it must stay where it is until it is done."""

    _fields_ = (
        ("next", ctypes.c_void_p),
        ("host", ctypes.c_void_p),
        ("device", ctypes.c_uint64),
        *((name, ctypes.c_int64) for name in ("num_bytes", "num_issued", "num_done", "num_borrowed")),
        ("start", ctypes.c_void_p),
        *((name, ctypes.c_int32) for name in ("state", "direction", "error", "unused")),
        ("outstanding", ctypes.c_int64 * MAX_RAILS),
        ("last", ctypes.c_void_p * MAX_RAILS),
    )


class Mover:
    """Copies of one GPU, in chunks over paths; ``close`` it before anything that paths point to is freed."""

    def __init__(self, table: DriverTable, options: Options, board: Board, direct: int) -> None:
        """Make a mover without paths: ``direct`` is the mask of its GPU's rails, registered on the board.

        Raises ``CompileError`` if ``mover.c`` cannot be compiled. The board stays open until the mover is closed.
        """
        self._library = load_c_library("libfusco-mover", *sources_of("libfusco-mover"))
        self._library.fusco_new.restype = ctypes.c_void_p
        self._library.fusco_drain_path.restype = ctypes.c_int64
        self._kept = (table, options)
        pointers = (ctypes.byref(table), ctypes.byref(options), ctypes.c_void_p(board.handle))
        self._handle = ctypes.c_void_p(self._library.fusco_new(*pointers, ctypes.c_uint32(direct)))
        if not self._handle:
            raise MemoryError("no memory for a mover")
        self._users, self._changed = 0, threading.Condition()

    def start(self) -> None:
        """Start the thread; raises ``ThreadError``."""
        if error := self._library.fusco_start(self._handle):
            raise ThreadError(f"the thread of copies could not be started: error {error} of pthread_create")

    def step(self) -> bool:
        """Do what can be done now, without the thread; return whether anything was."""
        return bool(self._library.fusco_step(self._handle))

    def open_path(self, rail: int, path: PathStreams) -> None:
        """Use a rail from now on."""
        self._library.fusco_open_path(self._handle, ctypes.c_int64(rail), ctypes.byref(path))

    def drain_path(self, rail: int) -> int:
        """Give a rail no more chunks; return how many are under way on it, none if the mover is closed."""
        with self._using() as handle:
            return 0 if handle is None else int(self._library.fusco_drain_path(handle, ctypes.c_int64(rail)))

    def submit(self, job: Job) -> None:
        """Queue a job."""
        self._library.fusco_submit(self._handle, ctypes.byref(job))

    def wait(self, job: Job, state: int, timeout_s: float = 0.0) -> int:
        """Wait until a job is in a state or beyond, at most that long; return the state that it is in."""
        with self._using() as handle:
            if handle is None:
                return int(job.state) if job.state >= DONE else FAILED
            timeout_ns = ctypes.c_int64(int(1e9 * min(timeout_s, _LONGEST_S)))
            return int(self._library.fusco_wait(handle, ctypes.byref(job), ctypes.c_int(state), timeout_ns))

    def order(self, job: Job, stream: int) -> int:
        """Have a stream wait for an issued job; return the driver's error. Jobs of a closed mover have ended."""
        with self._using() as handle:
            if handle is None:
                return 0
            return int(self._library.fusco_order(handle, ctypes.byref(job), ctypes.c_void_p(stream)))

    def close(self) -> None:
        """Stop the thread, after waits of other threads for its jobs have ended. May be called again."""
        with self._changed:
            handle, self._handle = self._handle, ctypes.c_void_p()
            self._changed.wait_for(lambda: not self._users)  # each has a limit
        if handle:
            self._library.fusco_free(handle)

    @contextmanager
    def _using(self) -> Iterator[ctypes.c_void_p | None]:
        """Keep the mover from being freed inside; ``None`` if it is closed."""
        with self._changed:
            handle = self._handle if self._handle else None
            self._users += 1
        try:
            yield handle
        finally:
            with self._changed:
                self._users -= 1
                self._changed.notify_all()
