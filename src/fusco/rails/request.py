"""Requests: sends and receives under way."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

from fusco.rails.binding import TOO_LARGE, RequestState, acquire

_DONE = 3  # a state
_SLICE_S = 0.1  # of a wait in the engine, so that signals are handled


class Poster(Protocol):
    """What a request needs of its channel."""

    @property
    def timeout_s(self) -> float:
        """The limit of a wait."""

    @property
    def error(self) -> Exception | None:
        """The error of the channel."""

    def wait_for(self, request: Request, limit_s: float) -> None:
        """Wait until a request is done, at most about ``limit_s``."""

    def timed_out(self, request: Request, limit_s: float) -> Exception:
        """Break the channel and return the error of a request that was waited for too long."""


class Request:
    """A send or a receive that has been posted. Its buffer belongs to the channel until ``done``."""

    __slots__ = ("_channel", "_memory", "on_done", "state")

    def __init__(
        self, channel: Poster, memory: Any, state: RequestState, on_done: Callable[[BaseException | None], None] | None
    ) -> None:
        self._channel, self._memory, self.state, self.on_done = channel, memory, state, on_done

    @property
    def verb(self) -> str:
        """``"isend"`` or ``"irecv"``."""
        return "irecv" if self.state.is_receive else "isend"

    @property
    def seq(self) -> int:
        """Number of the message among those of its channel and direction."""
        return int(self.state.seq)

    @property
    def finished_s(self) -> float:
        """When it was done, of ``time.monotonic``."""
        return float(self.state.finished_ns) / 1e9

    @property
    def done(self) -> bool:
        """True once the message was delivered, or cannot be."""
        return bool(self.state.state == _DONE) and bool(acquire(self.state, "state"))

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
        limit_s = self._channel.timeout_s if timeout_s is None else timeout_s
        end = time.monotonic() + limit_s
        while not self.done and (left_s := end - time.monotonic()) > 0:
            self._channel.wait_for(self, min(left_s, _SLICE_S))
        if not self.done:
            raise self._channel.timed_out(self, limit_s)
        if error := self.error:
            raise error
        return int(self.state.num_bytes)

    @property
    def error(self) -> Exception | None:
        """The error of a request that is done; ``None`` if its message was delivered."""
        state = self.state
        if state.result != TOO_LARGE:
            return self._channel.error if state.result else None
        if state.is_receive:
            sizes = f"a buffer of {state.size:,} bytes, the message has {state.num_bytes:,}"
        else:
            sizes = f"{state.size:,} bytes, more than the buffer of the peer's irecv"
        return ValueError(f"{self.verb} #{self.seq} has {sizes}")
