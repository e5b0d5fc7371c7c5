"""Liveness of peers, as the operating system knows it: processes of this machine, connections to other machines."""

from __future__ import annotations

import os
import select
from collections.abc import Mapping
from contextlib import closing

from fusco.core.errors import TransportError, reason_of

_NO_MEMORY = b"0 "  # the beginning of statm of a process without memory
_ELSEWHERE = -1


class Liveness:
    """Watches the processes of peers on this machine, and connections. Any thread may ask.

    A process counts as dead as soon as it has no memory map, which a killed process loses first of all, within 0.1 ms.
    It closes its connections after 40 to 60 ms, and a process descriptor (pidfd) shows its end after 140 to 200 ms,
    since its CUDA context must be freed before (on one H100, processes with 5 GB).
    """

    def __init__(self, pids: Mapping[int, int]) -> None:
        self._memory_maps: dict[int, int | None] = {}
        self._connections: dict[int, int] = {}
        try:
            for rank, pid in pids.items():
                self._memory_maps[rank] = _open_memory_map(pid)
        except BaseException:
            self.close()
            raise

    def add_connections(self, connections: Mapping[int, int]) -> None:
        """Watch connected sockets, too: descriptors by rank, which the caller keeps open until ``close``."""
        self._connections.update(connections)

    def is_dead(self, rank: int) -> bool:
        """Return whether a rank's process is dead; always False on another machine."""
        file = self._memory_maps.get(rank, _ELSEWHERE)
        if file is None or file == _ELSEWHERE:
            return file is None
        try:
            has_ended = os.pread(file, len(_NO_MEMORY), 0) == _NO_MEMORY
        except ProcessLookupError:
            has_ended = True
        except OSError:
            if rank in self._memory_maps:
                raise
            return False
        return has_ended and rank in self._memory_maps  # else it has been closed, and may be another file by now

    def disconnected(self) -> tuple[int, ...]:
        """Return the ranks whose connection has been closed: they are dead, or have closed their communicator."""
        if not (connections := dict(self._connections)):
            return ()
        poll = select.poll()
        for descriptor in connections.values():
            poll.register(descriptor, select.POLLRDHUP)
        closed = {descriptor for descriptor, _ in poll.poll(0)}
        # Descriptors that have been closed may be those of other files by now.
        return tuple(rank for rank, fd in connections.items() if fd in closed and rank in self._connections)

    def close(self) -> None:
        """Stop watching; other threads may still ask, and then find no rank dead."""
        self._connections.clear()
        while self._memory_maps:
            _, file = self._memory_maps.popitem()
            if file is not None:
                os.close(file)


def has_ended(pid: int) -> bool:
    """Return whether a process of this machine has ended, looked at once."""
    with closing(Liveness({0: pid})) as liveness:
        return liveness.is_dead(0)


def _open_memory_map(pid: int) -> int | None:
    """Return a file with the sizes of a process's memory, ``None`` if it has ended."""
    try:
        return os.open(f"/proc/{pid}/statm", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise TransportError(
            f"process {pid} of a rank on this machine cannot be watched: {reason_of(error)}"
        ) from error
