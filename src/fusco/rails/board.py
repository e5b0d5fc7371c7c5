"""The board: who uses which NIC of this host, in shared memory that all jobs of a user share.

A file of ``/dev/shm``, one for each user and network namespace, mapped by every endpoint. Each number has one writer,
so none needs an atomic update; all are little-endian, aligned to their size, and written by one store. Version 1:

========  =============================================================================================
offset    content
========  =============================================================================================
0         magic ``FUSCORLS``; then, 32 bits each, version, maximum of rails, of workers, bytes of a cell
24        64 bits: generation, which changes whenever a worker registers or leaves
64        16 rails, 64 bytes each: interface (16 bytes, zero-padded), speed in bit/s (64 bits)
1088      64 workers, 64 bytes each, 64 bits a field: pid (0: free), start time of that process (field 22 of
          ``/proc/PID/stat``), worker, mask of direct rails
8192      64 workers x 16 rails cells, 64 bytes each, 64 bits a field, written by that worker only: chunks posted,
          chunks completed, last transmission, last reception (nanoseconds of CLOCK_MONOTONIC), bytes sent, bytes
          received, chunks received, borrowed chunks outstanding. A worker with nothing under way sets its times
          back by hold_s - release_s of ``Limits``, so others need to compare them with hold_s only
========  =============================================================================================

Rows of workers and rails change under ``flock`` of the file. A worker that borrows a rail first counts itself, then
adds up the borrowed chunks of all workers, and takes its count back if they exceed the bound. All processes must be in
one pid namespace: rows of processes that have ended are reset.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import stat
import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fusco.core.errors import SharedMemoryError, reason_of
from fusco.rails.rail import MAX_RAILS, Rail

MAX_WORKERS = 64
FIELDS = 8  # 64-bit fields of a cell
POSTED, COMPLETED, LAST_TX, LAST_RX, TX_BYTES, RX_BYTES, RX_CHUNKS, BORROWED = range(FIELDS)
CELL_0 = 8192 // 8  # index of the first cell's first field
ROW_FIELDS = MAX_RAILS * FIELDS
_VERSION, _MAGIC = 1, b"FUSCORLS"
_HEADER = struct.Struct("<8sIIII")
_GENERATION = 24 // 8
_RAILS, _RAIL_BYTES, _RAIL = 64, 64, struct.Struct("<16sQ")
_WORKERS = 1088 // 8
_PID, _START, _WORKER, _DIRECT = range(4)
_NUM_BYTES = 8192 + MAX_WORKERS * ROW_FIELDS * 8
_LOCK_S, _LOCK_PAUSE_S = 10.0, 0.001  # changes take microseconds
_DIRECTORY = Path("/dev/shm")  # noqa: S108  the POSIX shared-memory file system of Linux


@dataclass(frozen=True)
class WorkerRow:
    """A registered worker: its row, process, number, and mask of direct rails."""

    row: int
    pid: int
    worker: int
    direct: int


@dataclass(frozen=True)
class NamedRail:
    """A rail as the board names it."""

    interface: str  # its name, of at most 15 bytes
    bits_per_s: int  # its speed; 0 if unknown


def named_path(kind: str, namespace: int) -> Path:
    """Return the board of this user for one kind of rails, in the namespace of an inode."""
    return _DIRECTORY / f"fusco-{kind}-v{_VERSION}-{os.getuid()}-{namespace}"


def default_path(network: int = 0) -> Path:
    """Return the board of this user and a network namespace, by inode, by default this one: NICs belong to it."""
    return named_path("rails", network or os.stat("/proc/self/ns/net").st_ino)


class LockHeldError(SharedMemoryError):
    """Another process holds the lock of a board for longer than changes take."""


class Board:
    """The board, mapped as ``memory``; ``fields`` are its 64-bit numbers. The last user removes the file.

    Whatever changes it waits for its lock, at most 10 s, then raises ``LockHeldError``.
    """

    def __init__(self, path: Path | None = None) -> None:
        """Open the board, or make it; ``SharedMemoryError`` if that fails or another user owns the file."""
        self.path = path or default_path()
        self._map_file()

    def _map_file(self) -> None:
        self._fd = -1
        try:
            fd = self._open()
            try:
                self.memory = mmap.mmap(fd, _NUM_BYTES)
            except BaseException:
                os.close(fd)
                raise
        except OSError as error:
            raise SharedMemoryError(f"cannot open the board of rails {self.path}: {reason_of(error)}") from error
        self._fd, self.fields = fd, memoryview(self.memory).cast("Q")

    def follow(self) -> bool:
        """Open the board anew if its last user has removed the file, as later users have another; return if it has.

        Raises ``SharedMemoryError`` if that fails; the board is closed then.
        """
        if os.fstat(self._fd).st_nlink:
            return False
        os.close(self._fd)  # and with it its lock; the old memory is unmapped with the last reference to it
        self._map_file()
        return True

    def close(self) -> None:
        """Unmap the board; without registered workers that live, remove its file."""
        if self._fd < 0:
            return
        with contextlib.suppress(LockHeldError), self._locked():  # a file that stays is for its next user
            self._reset_dead()
            if not self.workers() and os.fstat(self._fd).st_nlink:  # else the path is another board's
                self.path.unlink(missing_ok=True)
        self.fields.release()
        with contextlib.suppress(BufferError):  # rows still view it; it is unmapped with the last of them
            self.memory.close()
        os.close(self._fd)
        self._fd = -1

    @property
    def generation(self) -> int:
        """A number that changes whenever a worker registers or leaves."""
        return self.fields[_GENERATION]

    def register(self, worker: int, direct: int, rails: Sequence[NamedRail | Rail]) -> int:
        """Take a free row for this process and return it; ``SharedMemoryError`` if all are taken, or that fails.

        Follows the file, as ``follow``, so no other row may be in use.
        """
        pid = os.getpid()
        try:
            start = _start_time(pid)
        except OSError as error:
            raise SharedMemoryError(f"cannot register on the board of rails {self.path}: {reason_of(error)}") from error
        with self._locked(follows=True):
            self._reset_dead()
            rows = {each.row for each in self.workers()}
            free = next((row for row in range(MAX_WORKERS) if row not in rows), None)
            if free is None:
                raise SharedMemoryError(f"the board of rails {self.path} has {MAX_WORKERS} workers, the maximum")
            for i, rail in enumerate(rails):
                offset = _RAILS + i * _RAIL_BYTES
                self.memory[offset : offset + _RAIL.size] = _RAIL.pack(rail.interface.encode(), rail.bits_per_s)
            self._clear_cells(free)
            for field, value in ((_START, start), (_WORKER, worker), (_DIRECT, direct), (_PID, pid)):
                self.fields[_WORKERS + free * FIELDS + field] = value
            self._changed()
        return free

    def unregister(self, row: int) -> None:
        """Give a row back."""
        with self._locked():
            self._free(row)

    def reset_dead(self) -> None:
        """Free the rows of processes that have ended, unless another process is changing the board."""
        if any(not self._is_alive(each) for each in self.workers()):
            with contextlib.suppress(LockHeldError), self._locked(limit_s=0):
                self._reset_dead()

    def workers(self) -> list[WorkerRow]:
        """Return the registered workers, by row."""
        found = []
        for row in range(MAX_WORKERS):
            first = _WORKERS + row * FIELDS
            if pid := self.fields[first + _PID]:
                found.append(WorkerRow(row, pid, self.fields[first + _WORKER], self.fields[first + _DIRECT]))
        return found

    def rails(self) -> list[tuple[str, int]]:
        """Return interface and speed in bit/s of each rail, as its last user registered them."""
        rows = (_RAIL.unpack_from(self.memory, _RAILS + i * _RAIL_BYTES) for i in range(MAX_RAILS))
        return [(name.rstrip(b"\0").decode(), speed) for name, speed in rows if name[0]]

    def cell(self, row: int, rail: int) -> list[int]:
        """Return a copy of the fields of a worker's cell."""
        first = CELL_0 + row * ROW_FIELDS + rail * FIELDS
        return self.fields[first : first + FIELDS].tolist()

    def _open(self) -> int:
        """Open the file, and write its header if it is new; it is checked not to have been removed meanwhile."""
        while True:
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                self._lock(fd)
                found = os.fstat(fd)
                if found.st_nlink:
                    self._check_or_format(fd, found)
                    fcntl.flock(fd, fcntl.LOCK_UN)
                    return fd
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)

    def _check_or_format(self, fd: int, found: os.stat_result) -> None:
        if found.st_uid != os.geteuid() or not stat.S_ISREG(found.st_mode):
            raise SharedMemoryError(f"{self.path} belongs to user {found.st_uid}, not to {os.geteuid()}; remove it")
        header = _HEADER.pack(_MAGIC, _VERSION, MAX_RAILS, MAX_WORKERS, FIELDS * 8)
        written = os.pread(fd, _HEADER.size, 0)
        if found.st_size <= _NUM_BYTES and not any(written):  # new, or its maker was killed before it wrote the header
            os.posix_fallocate(fd, 0, _NUM_BYTES)
            os.pwrite(fd, header, 0)
        elif found.st_size != _NUM_BYTES or written != header:
            raise SharedMemoryError(f"{self.path} is not a board of rails of version {_VERSION}; remove it")

    def _lock(self, fd: int, limit_s: float | None = None) -> None:
        limit_s = _LOCK_S if limit_s is None else limit_s
        until_s = time.monotonic() + limit_s
        while not _has_locked(fd):
            if time.monotonic() >= until_s:
                raise LockHeldError(
                    f"another process has held the lock of the board of rails {self.path} for {limit_s} s: "
                    f"fuser {self.path} shows those that have it open"
                )
            time.sleep(_LOCK_PAUSE_S)

    @contextlib.contextmanager
    def _locked(self, limit_s: float | None = None, *, follows: bool = False) -> Iterator[None]:
        self._lock(self._fd, limit_s)
        while follows and self.follow():
            self._lock(self._fd, limit_s)
        try:
            yield
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    def _reset_dead(self) -> None:
        for each in self.workers():
            if not self._is_alive(each):
                self._free(each.row)

    def _is_alive(self, worker: WorkerRow) -> bool:
        try:
            start = _start_time(worker.pid)
        except OSError:
            return True
        return start == self.fields[_WORKERS + worker.row * FIELDS + _START]

    def _free(self, row: int) -> None:
        self.fields[_WORKERS + row * FIELDS + _PID] = 0
        self._clear_cells(row)
        self._changed()

    def _clear_cells(self, row: int) -> None:
        first = 8 * (CELL_0 + row * ROW_FIELDS)
        self.memory[first : first + 8 * ROW_FIELDS] = bytes(8 * ROW_FIELDS)

    def _changed(self) -> None:
        self.fields[_GENERATION] += 1


def _start_time(pid: int) -> int:
    """Return the start time of a process in clock ticks since boot; 0 if there is none, or only its remains.

    Raises ``OSError`` if that is not known, for example out of file descriptors.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return 0
    state, *fields = text.rpartition(")")[2].split()
    return 0 if state in "ZX" else int(fields[18])


def _has_locked(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
