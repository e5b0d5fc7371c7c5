"""Thread that releases a device whose kernels wait for a rank that is gone, while no host waits for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from fusco.control.watchdog import Watchdog

# A death is noticed within this time, and the interpreter's switch interval of 5 ms.
_INTERVAL_S = 0.02
# A rank that leaves has completed its own calls, but others may still complete theirs.
_GRACE_AFTER_DEPARTURE_S = 1.0
_ENDING_S = 1.0  # longer than the thread needs, unless it is sending a report


class Grace:
    """Time that ranks have for their last calls once one has left, as that one has completed its own; of one thread."""

    def __init__(self, watchdog: Watchdog) -> None:
        self._watchdog, self._departed_since = watchdog, 0.0

    @property
    def is_over(self) -> bool:
        """True if no rank has left, or the first a second ago, as far as this was asked."""
        if not self._watchdog.has_departed_rank:
            return True
        self._departed_since = self._departed_since or time.monotonic()
        return time.monotonic() - self._departed_since > _GRACE_AFTER_DEPARTURE_S


class PeerWatch:
    """Examines all ranks every 20 ms once it is started, and calls a function as soon as one is gone.

    Replays of a CUDA graph involve no host, so no call of ``Watchdog`` limits their waits. The thread calls nothing of
    CUDA, and so does not invalidate a capture of another thread.
    """

    def __init__(self, watchdog: Watchdog, on_loss: Callable[[], None]) -> None:
        """``on_loss`` is called once, in the thread."""
        self._watchdog, self._on_loss = watchdog, on_loss
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fusco-peer-watch", daemon=True)

    def start(self) -> None:
        """Start the thread, unless it has been started."""
        if self._thread.ident is None:
            self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._is_over.set()
        if self._thread.ident is not None:
            self._thread.join(_ENDING_S)

    def _run(self) -> None:
        is_lost = True  # also if this fails: without the thread, waits of the device would have no limit
        try:
            is_lost = self._finds_loss()
        finally:
            if is_lost:
                self._on_loss()
                self._watchdog.report_the_dead()

    def _finds_loss(self) -> bool:
        """Wait until a rank is gone; return False once this is closed."""
        watchdog, grace = self._watchdog, Grace(self._watchdog)
        while not self._is_over.wait(_INTERVAL_S):
            if grace.is_over and (watchdog.has_departed_rank or watchdog.has_failed_rank):
                return True
        return False
