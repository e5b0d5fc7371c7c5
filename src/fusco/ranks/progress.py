"""Progress of ranks, seen from the process that started them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # re-exported without saying so

_KEY, _NOTE_KEY = "fusco/progress", "fusco/progress/note"


class ProgressReporter:
    """A rank's end: counts steps in the store that started the ranks; without its port, tells nobody."""

    def __init__(self, port: int | None) -> None:
        self._store = None if port is None else TCPStore("127.0.0.1", port, is_master=False)

    @classmethod
    def of_rank(cls, rank: int, port: int | None) -> ProgressReporter:
        """One that speaks for all ranks: rank 0's."""
        return cls(port if rank == 0 else None)

    def advance(self, note: str = "") -> None:
        """One step is done; a note says what came of it."""
        if not self._store:
            return
        if note:
            self._store.set(_NOTE_KEY, note)
        self._store.add(_KEY, 1)


def latest_note(store: TCPStore) -> str:
    """What was noted last; empty if nothing was."""
    return store.get(_NOTE_KEY).decode() if store.check([_NOTE_KEY]) else ""


@contextmanager
def watching(store: TCPStore, on_progress: Callable[[int], None], seconds: float = 0.1) -> Iterator[None]:
    """Call ``on_progress`` with the number of steps done so far, every now and then, from a thread of its own."""
    base, stop = store.add(_KEY, 0), threading.Event()

    def look() -> None:
        while not stop.wait(seconds):
            on_progress(store.add(_KEY, 0) - base)

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        on_progress(store.add(_KEY, 0) - base)
