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
        departed_since = 0.0
        while not self._is_over.wait(_INTERVAL_S):
            if self._watchdog.has_departed_rank:
                departed_since = departed_since or time.monotonic()
                is_lost = time.monotonic() - departed_since > _GRACE_AFTER_DEPARTURE_S
            else:
                is_lost = self._watchdog.has_failed_rank
            if is_lost:
                self._on_loss()
                self._watchdog.report_the_dead()
                return
