"""Progress of ranks, reported to the process that started them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from errno import ETIMEDOUT
from socket import create_connection, create_server

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # re-exported without saying so

_LOOPBACK, _LIMIT_S, _POLL_S = "127.0.0.1", 5.0, 0.1
_KEY, _TOTAL_KEY, _NOTE_KEY = "fusco/progress", "fusco/progress/total", "fusco/progress/note"


class ProgressReporter:
    """Counts rank 0's steps in the store of ``watching``; on other ranks, or without its port, does nothing."""

    def __init__(self, rank: int, port: int | None, num_steps: int) -> None:
        self._store = None if rank or port is None else TCPStore(_LOOPBACK, port, is_master=False)
        if self._store:
            self._store.set(_TOTAL_KEY, str(num_steps))

    def advance(self, note: str = "") -> None:
        """Count a finished step, with a note on its result."""
        if not self._store:
            return
        if note:
            self._store.set(_NOTE_KEY, note)
        self._store.add(_KEY, 1)


def check_loopback() -> None:
    """Raise ``OSError`` unless processes of this machine reach each other over the loopback device."""
    try:
        with create_server((_LOOPBACK, 0)) as server, create_connection(server.getsockname(), _LIMIT_S):
            pass
    except OSError as error:
        number, reason = (error.errno, error.strerror) if error.errno else (ETIMEDOUT, f"nothing within {_LIMIT_S:g} s")
        raise OSError(number, f"processes do not reach each other at {_LOOPBACK}: {reason}") from error


def new_store() -> TCPStore:
    """Return a store that this process serves on a free port, so that it outlives any rank.

    Raises ``OSError`` as ``check_loopback``: the store itself would try for minutes, and could not be interrupted.
    """
    check_loopback()
    return TCPStore(_LOOPBACK, 0, is_master=True, wait_for_workers=False)


@contextmanager
def watching(store: TCPStore, on_progress: Callable[[int, int, str], None]) -> Iterator[None]:
    """Call ``on_progress`` every tenth of a second from a separate thread.

    It is given the number of finished steps, that of all, and a note; until ranks report, 0 of 0 without a note.
    """
    stop = threading.Event()

    def report() -> None:
        num_done = store.add(_KEY, 0)
        total, note = (store.get(key).decode() if store.check([key]) else "" for key in (_TOTAL_KEY, _NOTE_KEY))
        on_progress(num_done, int(total or 0), note)

    def poll() -> None:
        while not stop.wait(_POLL_S):
            report()

    thread = threading.Thread(target=poll, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        report()
