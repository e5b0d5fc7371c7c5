"""Peer-visible POSIX shared memory without a name, so that no file can be left behind.

A segment is an unnamed file of the shared-memory file system (``O_TMPFILE``), readable by its owner only. Peers open
it through ``/proc/PID/fd/FD`` of the rank that made it. The kernel frees it with the last process that has it mapped,
however that process ends.
"""

from __future__ import annotations

import errno
import mmap
import os
import resource
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from fusco.core.errors import SharedMemoryError, reason_of
from fusco.core.memory_size import available_memory_bytes

SHARED_MEMORY_DIR = "/dev/shm"  # noqa: S108  the POSIX shared-memory file system of Linux
# A signal during it makes the kernel give back what a call has reserved, and Python begins the call again:
# where a timer sends signals a call for all of a large segment would never end. A page of 2 MiB, reserved in 0.5 ms.
_RESERVED_AT_ONCE = 1 << 21
_REMEDIES = "max_tokens_per_rank, max_bytes_per_token, or slice_bytes x ring_depth"


@dataclass(frozen=True)
class SegmentAddress:
    """Address by which processes of the same machine open a segment."""

    pid: int
    fd: int
    num_bytes: int


class SharedSegment(AbstractContextManager["SharedSegment"]):
    """A shared-memory segment, mapped by one rank; ``memory`` is its bytes, uint8 (num_bytes,)."""

    def __init__(self, fd: int, num_bytes: int) -> None:
        self._fd = fd
        flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
        try:
            mapped = mmap.mmap(fd, num_bytes, flags=flags)
        except OSError as error:
            raise SharedMemoryError(_not_mapped(num_bytes, error)) from error
        self.memory = torch.frombuffer(mapped, dtype=torch.uint8)

    @classmethod
    def create(cls, num_bytes: int, num_ranks: int = 1, private_bytes: int = 0) -> SharedSegment:
        """Make a segment of zeros and reserve all its memory.

        ``num_ranks`` ranks of this machine make one at the same time, and allocate ``private_bytes`` each in addition.
        Raises ``SharedMemoryError``, with the bytes needed and free, if the machine has no room for all of them.
        """
        try:
            check_room(num_bytes, num_ranks, private_bytes)
            fd = os.open(SHARED_MEMORY_DIR, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
            try:
                for first in range(0, num_bytes, _RESERVED_AT_ONCE):
                    os.posix_fallocate(fd, first, min(_RESERVED_AT_ONCE, num_bytes - first))
                return cls(fd, num_bytes)
            except BaseException:
                os.close(fd)
                raise
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.ENOMEM):
                raise SharedMemoryError(_no_room(num_bytes, num_ranks, free_bytes())) from error
            raise SharedMemoryError(f"cannot make shared memory in {SHARED_MEMORY_DIR}: {reason_of(error)}") from error

    @classmethod
    def open_peer(cls, address: SegmentAddress) -> SharedSegment:
        """Map the segment of another process of this user on this machine; ``SharedMemoryError`` if that fails."""
        path = f"/proc/{address.pid}/fd/{address.fd}"
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise SharedMemoryError(f"cannot open a peer's shared memory: {reason_of(error)}") from error
            raise SharedMemoryError(
                f"cannot open a peer's shared memory at {path} ({error.strerror}); ranks of one node must run as one "
                f"user and see each other's processes. If they are in different containers, set ranks_per_node=1"
            ) from error
        if os.fstat(fd).st_size != address.num_bytes:
            os.close(fd)
            raise SharedMemoryError(f"cannot open a peer's shared memory at {path}: the peer has closed it")
        try:
            return cls(fd, address.num_bytes)
        except BaseException:
            os.close(fd)
            raise

    @property
    def address(self) -> SegmentAddress:
        """The address by which peers open it."""
        return SegmentAddress(os.getpid(), self._fd, len(self.memory))

    def close(self) -> None:
        """Close the descriptor; the memory is freed with the last tensor that views it."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            self.memory = torch.empty(0, dtype=torch.uint8, device="cpu")

    def __exit__(self, *_: object) -> None:
        self.close()


def free_bytes() -> int:
    """Return how much shared memory can be allocated: the free bytes of its file system, or of the machine if less."""
    room = os.statvfs(SHARED_MEMORY_DIR)
    return min(room.f_bavail * room.f_frsize, available_memory_bytes())


def _no_room(needed: int, num_ranks: int, free: int) -> str:
    return (
        f"{num_ranks} rank(s) on this machine need {needed:,} bytes of shared memory each but {SHARED_MEMORY_DIR} has "
        f"room for {free:,}; lower {_REMEDIES}, or give the machine (in a container: --shm-size) more"
    )


def _not_mapped(num_bytes: int, error: OSError) -> str:
    if error.errno != errno.ENOMEM:
        return f"{num_bytes:,} bytes of shared memory could not be mapped: {reason_of(error)}"
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    limit_in_words = "no limit" if limit == resource.RLIM_INFINITY else f"a limit of {limit:,} bytes"
    return (
        f"{num_bytes:,} bytes of shared memory were allocated, but could not be mapped: {error.strerror}. This "
        f"process has {limit_in_words} for all that it maps (ulimit -v), and the kernel limits the number of mappings "
        f"(sysctl vm.max_map_count)"
    )


def check_room(num_bytes: int, num_ranks: int, private_bytes: int) -> None:
    """Raise ``SharedMemoryError`` if the machine has no room for what ``SharedSegment.create`` makes."""
    # Reserving more than the machine has would wake the kernel's out-of-memory killer before it fails.
    free = free_bytes()
    if num_bytes * num_ranks > free:
        raise SharedMemoryError(_no_room(num_bytes, num_ranks, free))
    available = available_memory_bytes()
    if (num_bytes + private_bytes) * num_ranks > available:
        raise SharedMemoryError(
            f"{num_ranks} rank(s) on this machine need {num_bytes:,} bytes of shared and {private_bytes:,} of private "
            f"memory each, but it has {available:,}; lower {_REMEDIES}"
        )
