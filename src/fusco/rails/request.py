"""Requests: sends and receives under way."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Request:
    """A send or a receive that has been posted. Its buffer belongs to the channel until ``done``.

    Attributes:
        verb: ``"isend"`` or ``"irecv"``.
        seq: number of the message among those of its channel and direction.
        finished_s: when it was done, of ``time.monotonic``.
    """

    __slots__ = (
        *("_error", "_finished", "_num_bytes", "_on_done", "_timed_out", "_timeout_s"),
        *("finished_s", "seq", "verb"),
    )

    def __init__(
        self,
        verb: str,
        seq: int,
        timeout_s: float,
        timed_out: Callable[[Request, float], BaseException],
        on_done: Callable[[BaseException | None], None] | None = None,
    ) -> None:
        self.verb, self.seq, self._timeout_s, self._timed_out = verb, seq, timeout_s, timed_out
        self._finished = threading.Lock()  # held until the request has finished
        self._finished.acquire()
        self._num_bytes, self.finished_s, self._on_done = 0, 0.0, on_done
        self._error: BaseException | None = None

    @property
    def done(self) -> bool:
        """True once the message was delivered, or cannot be."""
        return not self._finished.locked()

    def wait(self, timeout_s: float | None = None) -> int:
        """Wait until the message was delivered and return its bytes.

        Args:
            timeout_s: the limit of this wait; by default that of the endpoint.

        Raises:
            PeerFailureError: if the peer has left, if no rail to it is left, or if the limit has passed; the channel
                is broken then.
            ValueError: if the message is larger than the buffer of its receive.
            ClosedError: if the channel was closed before.
        """
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        if self._finished.acquire(timeout=limit_s):
            self._finished.release()
        elif not self.done:
            raise self._timed_out(self, limit_s)
        if self._error is not None:
            raise self._error
        return self._num_bytes

    def finish(self, num_bytes: int, error: BaseException | None = None) -> None:
        """Say that it has finished; for the thread of the endpoint, once."""
        self._num_bytes, self._error, self.finished_s = num_bytes, error, time.monotonic()
        self._finished.release()
        if self._on_done:
            try:
                self._on_done(error)
            except Exception as raised:
                raise RuntimeError(f"on_done of {self.verb} #{self.seq} raised {raised!r}") from raised
