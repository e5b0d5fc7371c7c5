"""A channel: messages between two workers over all rails of their hosts, in order, from and to any buffer."""

from __future__ import annotations

import ctypes
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from fusco.core.errors import ClosedError, PeerFailureError, Stall
from fusco.rails.binding import CLOSED, FORKED, LEFT, TOO_LARGE, ChannelState, RequestState, acquire, functions

CLOSING_S = 4.0  # what is left to deliver must pass rails that may have failed; the engine gives up after 3 s
_DONE = 3  # a state
_SLICE_S = 0.1  # of a wait in the engine, so that signals are handled


class Owner(Protocol):
    """What a channel needs of its endpoint."""

    worker: int
    timeout_s: float
    is_polled: bool
    failure: Exception | None

    def wait_until(self, condition: Callable[[], bool], limit_s: float) -> bool:
        """Wait for what changes in the engine."""

    def begin_callbacks(self) -> None:
        """Begin to call ``on_done`` of requests."""


class Channel:
    """Messages to and from one worker of another host. Any thread may post; message i goes into receive i.

    Attributes:
        peer: the worker at the other end, as numbered on its host.
        name: names the channel at both ends.
        num_rails: rails that both hosts have.
    """

    def __init__(self, endpoint: Owner, handle: int, name: bytes) -> None:
        self._endpoint, self._handle, self.name = endpoint, handle, name
        self._state = ChannelState.from_address(handle)
        weakref.finalize(self, functions()["release"], handle).atexit = False
        self.peer, self.num_rails = int(self._state.peer), int(self._state.num_rails)
        self.posting = threading.Lock()  # held while something is posted; ``close`` of the endpoint takes it, too
        self._open: deque[Request] = deque()  # in order; their memory is kept until they are done
        self._error: Exception | None = None

    def isend(self, buffer: Any, on_done: Callable[[BaseException | None], None] | None = None) -> Request:
        """Send a buffer or a contiguous CPU tensor; its memory must not change until the request is done.

        ``on_done`` is then called with the error if there is one: in a thread of the endpoint, or in ``poll``. If it
        raises, the endpoint fails.

        Raises:
            TypeError, ValueError: for anything else.
            ClosedError: if the channel was closed.
        """
        return self._post(as_bytes(buffer, writable=False), on_done, is_receive=0)

    def irecv(self, buffer: Any, on_done: Callable[[BaseException | None], None] | None = None) -> Request:
        """Receive the next message into a writable buffer or contiguous CPU tensor, which may be larger than it.

        ``wait`` returns the bytes of the message. ``on_done`` and errors as of ``isend``.
        """
        return self._post(as_bytes(buffer, writable=True), on_done, is_receive=1)

    @property
    def rails(self) -> tuple[int, ...]:
        """The rails that are connected now."""
        usable = self._state.usable
        return tuple(rail for rail in range(self.num_rails) if usable >> rail & 1)

    @property
    def is_complete(self) -> bool:
        """True if all rails are connected."""
        return len(self.rails) == self.num_rails

    @property
    def is_closed(self) -> bool:
        """True once the channel was closed, or has failed."""
        return bool(self._state.is_closed)

    @property
    def error(self) -> Exception | None:
        """The error of the channel; ``None`` while it works."""
        if self._error is None and self._state.error and (code := acquire(self._state, "error")):
            if code == CLOSED:
                self._error = ClosedError(self._state.reason.decode())
            else:
                self._error = self._endpoint.failure or self._failure(has_left=code == LEFT)
        return self._error

    @property
    def num_bytes(self) -> int:
        """Bytes written to and read from the channel's rails."""
        return int(self._state.num_bytes)

    @property
    def owes_credits(self) -> bool:
        """True if the peer waits for an acknowledgement or a grant that was not written yet."""
        return bool(self._state.num_owed)

    def close(self) -> None:
        """Close the channel; requests that are not done fail, here and at the peer. May be called again."""
        if not self.is_closed:
            self.begin_close()
            self._endpoint.wait_until(lambda: self.is_closed, CLOSING_S)

    def begin_close(self) -> None:
        """Begin to close the channel; it ``is_closed`` once the peer is notified."""
        functions()["close_channel"](self._handle)

    # What follows is for the endpoint and for requests.

    @property
    def timeout_s(self) -> float:
        """The limit of a wait."""
        return self._endpoint.timeout_s

    def wait_for(self, request: Request, limit_s: float) -> None:
        """Wait until a request is done, at most about ``limit_s``."""
        if self._endpoint.is_polled:
            self._endpoint.wait_until(lambda: request.done, limit_s)
        else:
            functions()["wait_for"](ctypes.byref(request.state), int(1e9 * limit_s))
        self._forget_done()

    def timed_out(self, request: Request, limit_s: float) -> Exception:
        """Break the channel and return the error of a request that was waited for too long."""
        self.give_up(f"worker {self.peer} did not take part within {limit_s:g} s; ")
        self._endpoint.wait_until(lambda: request.done, CLOSING_S)  # until then bytes may arrive in the caller's memory
        return self._failure(request) if self._endpoint.failure is None else self._endpoint.failure

    def give_up(self, reason: str) -> None:
        """Break the channel; the states of its rails are added to the reason."""
        with self.posting:
            functions()["give_up"](self._handle, reason.encode())

    def settle(self) -> None:
        """Call ``on_done`` of requests that have finished, in the order of their posting."""
        with self.posting:
            # The latest first: a receive that is done has only such before it.
            finished = [each for each in reversed(self._open) if each.done]
            for each in finished:
                self._open.remove(each)
        for request in reversed(finished):
            if on_done := request.on_done:
                try:
                    on_done(request.error)
                except Exception as raised:
                    raise RuntimeError(f"on_done of {request.verb} #{request.seq} raised {raised!r}") from raised

    def _forget_done(self) -> None:
        with self.posting:
            while self._open and self._open[0].done and self._open[0].on_done is None:
                self._open.popleft()

    def _post(self, view: memoryview, on_done: Callable[..., None] | None, is_receive: int) -> Request:
        memory = np.frombuffer(view, np.uint8)  # keeps the memory, and knows its address
        state = RequestState(
            data=memory.ctypes.data, size=memory.nbytes, is_receive=is_receive, notifies=on_done is not None
        )
        request = Request(self, memory, state, on_done)
        self._forget_done()
        if on_done:
            self._endpoint.begin_callbacks()
        with self.posting:
            if code := functions()["post"](self._handle, ctypes.byref(state)):
                if code == FORKED:
                    raise ClosedError("the channel belongs to the process that this one was forked from")
                raise self.error or ClosedError("the channel was closed")
            self._open.append(request)
        return request

    def _failure(self, request: Request | None = None, *, has_left: bool = False) -> PeerFailureError:
        state, worker = self._state, self._endpoint.worker
        what = f"{request.verb} #{request.seq}" if request else "a channel"
        seen = f"{state.num_seen} of {self.num_rails} rails connected"
        stall = Stall("transfer over rails", (self.peer,), "the message" if request else "a rail", seen)
        return PeerFailureError(
            rank=worker,
            peers=(self.peer,),
            operation=what,
            stall=stall,
            reason=state.reason.decode(errors="replace"),
            has_left=has_left,
        )


def as_bytes(buffer: Any, *, writable: bool) -> memoryview:
    """Return the bytes of a buffer or of a contiguous tensor on the CPU; the memoryview shares its memory.

    Raises ``TypeError`` for anything else, ``ValueError`` for memory that is not contiguous or may not be written.
    """
    if hasattr(buffer, "data_ptr"):
        buffer = _tensor_memory(buffer)
    try:
        view = memoryview(buffer)
    except TypeError:
        raise TypeError(f"a buffer or a tensor is needed, got {type(buffer).__name__}") from None
    if not view.c_contiguous:
        raise ValueError(f"a buffer must be contiguous, got shape {view.shape} with strides {view.strides}")
    if writable and view.readonly:
        raise ValueError("a buffer to receive into must be writable, got a read-only one")
    return view.cast("B") if view.nbytes else memoryview(bytearray())


def _tensor_memory(tensor: Any) -> Any:
    import torch  # noqa: PLC0415  only for callers that have tensors, so it is loaded

    from fusco.core.rows import why_not_movable  # noqa: PLC0415  imports torch

    if tensor.device.type != "cpu":
        raise ValueError(f"a tensor must be on the CPU, got one on {tensor.device}")
    if why_not := why_not_movable(tensor):
        raise TypeError(f"a tensor {why_not}")
    if not tensor.is_contiguous():
        raise ValueError(f"a tensor must be contiguous, got strides {tensor.stride()} for shape {tuple(tensor.shape)}")
    return tensor.detach().reshape(-1).view(torch.uint8).numpy() if tensor.numel() else bytearray()


class Request:
    """A send or a receive that has been posted. Its buffer belongs to the channel until ``done``."""

    __slots__ = ("_channel", "_memory", "on_done", "state")

    def __init__(
        self, channel: Channel, memory: Any, state: RequestState, on_done: Callable[[BaseException | None], None] | None
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
