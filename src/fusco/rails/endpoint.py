"""An endpoint: a worker's access to all rails of its host."""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from fusco.core.errors import ClosedError, TransportError
from fusco.rails.binding import NAME_BYTES, SECRET_BYTES, ChannelState, Config, Peer, Progress, ask, functions, texts_of
from fusco.rails.channel import CLOSING_S, Channel
from fusco.rails.policy import Limits, Policy
from fusco.rails.rail import MAX_RAILS, Address, Rail, check_rails

_SPREAD_S = 0.25  # after the first rail of a new channel, the others get this long before `connect` returns
_SLICE_S, _PAUSE_S = 0.1, 0.0002  # of a wait in the engine, so that signals are handled; between polls

_running: set[Endpoint] = set()  # module state: those with a thread live until they are closed


class Endpoint(contextlib.AbstractContextManager["Endpoint"]):
    """A worker's access to the rails of its host. It has one thread; ``close`` it, or use it in ``with``.

    Attributes:
        worker: this worker's number on its host.
        rails: the rails of this host.
        limits: bounds of the scheduler.
        timeout_s: the limit of every wait.
        is_polled: whether it has no thread.
    """

    def __init__(
        self,
        *,
        worker: int,
        rails: Sequence[Rail],
        policy: str | Policy = "fuselink",
        limits: Limits | None = None,
        timeout_s: float = 60.0,
        board: Path | None = None,
        is_polled: bool = False,
    ) -> None:
        """Register the worker on the host's board and start the thread, which is not one of Python.

        Args:
            worker: this worker's number on its host; it must own a rail.
            rails: the rails of this host, in the order that all hosts have: rail i is connected to rail i.
            policy: a name of ``POLICIES``, or one of your own making.
            limits: bounds of the scheduler; at most 32 chunks may be outstanding on a rail.
            timeout_s: the limit of every wait.
            board: the file of the board; by default that of this user and network namespace.
            is_polled: start no thread: everything happens in ``poll`` and in the other methods, in one thread of the
                caller.

        Raises:
            ValueError: if the worker owns no rail, or for rails or a policy that cannot be.
            CompileError: without the compiled engine and without a C compiler.
            SharedMemoryError: if the board cannot be used.
            TransportError: without descriptors or threads left.
        """
        self.worker, self.rails, self.limits = worker, check_rails(rails), limits or Limits()
        if not any(worker in rail.owners for rail in self.rails):
            owners = ", ".join(f"{rail.interface}: {rail.owners}" for rail in self.rails)
            raise ValueError(f"worker {worker} owns none of the rails; their owners are {owners}")
        self.timeout_s, self.is_polled = timeout_s, is_polled
        self.failure: Exception | None = None  # of an endpoint that was closed or has failed
        texts = texts_of(worker, self.rails, policy, self.limits, timeout_s, board)
        config = Config(**{name: os.fsencode(text) for name, text in texts.items()})
        self.handle: int | None = ask("open", ctypes.byref(config), is_polled)
        self._pid, self._progress = os.getpid(), Progress.from_address(self.handle)
        self._address: Address | None = None
        self._listen: int | None = None
        self._channels: dict[bytes, Channel] = {}
        self._accepted: deque[Channel] = deque()
        self._num_settled, self._callbacks = 0, threading.Thread(target=self._call_back, daemon=True)
        self._changing, self._num_waiting = threading.Lock(), 0  # threads in the engine's wait
        if not is_polled:
            _running.add(self)

    def poll(self) -> float:
        """Progress all channels without waiting, for endpoints without a thread; return the seconds until the next.

        An event loop polls when ``fileno`` is readable, or after that time at the latest.
        """
        self._check_open()
        wait_s: float = functions()["poll"](self.handle) / 1e9
        if (num_done := self._progress.num_done) != self._num_settled:
            self._num_settled = num_done
            for channel in list(self._channels.values()):
                channel.settle()
        return max(0.0, wait_s)

    def fileno(self) -> int:
        """Return a descriptor that is readable when an endpoint without a thread has something to do; see ``poll``."""
        self._check_open()
        return int(functions()["fileno"](self.handle))

    def listen(self) -> Address:
        """Listen on all rails and return the address, which peers pass to ``connect``; raises ``TransportError``."""
        self._check_open()
        if self._address is None:
            secret, ports = ctypes.create_string_buffer(SECRET_BYTES), (ctypes.c_int * MAX_RAILS)()
            self._listen = ask("listen", self.handle, secret, ports)
            rails = tuple((rail.address, ports[i]) for i, rail in enumerate(self.rails))
            self._address = Address(self.worker, self.limits.chunk_bytes, rails, secret.raw)
        return self._address

    def accept(self, timeout_s: float | None = None) -> Channel:
        """Return the next channel that a peer has connected, after ``listen``.

        Raises ``TransportError`` if there is none within the limit, by default that of the endpoint.
        """
        self._check_open()
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        self.wait_until(lambda: self._take_accepted() or self.handle is None, limit_s)
        with contextlib.suppress(IndexError):
            return self._accepted.popleft()
        self._check_open()
        raise TransportError(f"worker {self.worker}: no peer has connected within {limit_s:g} s")

    def connect(self, address: Address, timeout_s: float | None = None) -> Channel:
        """Connect to an endpoint over all rails that both hosts have, and return the channel.

        Raises ``PeerFailureError`` if no rail connects within the limit, by default that of the endpoint. Rails that
        come later are used from then on.
        """
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        channel = self.dial(address, secrets.token_bytes(NAME_BYTES))
        self.wait_until(lambda: bool(channel.rails) or channel.is_closed, limit_s)
        self.wait_until(lambda: channel.is_complete or channel.is_closed, min(limit_s, _SPREAD_S))
        if not channel.rails:
            channel.give_up(f"no rail to worker {channel.peer} was connected within {limit_s:g} s: ")
            self.wait_until(lambda: channel.is_closed, CLOSING_S)
        if error := channel.error:
            raise error
        return channel

    def dial(self, address: Address, name: bytes) -> Channel:
        """Begin to connect a channel of a name, 16 bytes, and return it at once; its rails follow."""
        self._check_open()
        peer = Peer(address.worker, len(address.rails), address.chunk_bytes, secret=tuple(address.secret))
        for i, (host, port) in enumerate(address.rails):
            peer.addresses[i], peer.ports[i] = host.encode(), port
        return self._add(functions()["dial"](self.handle, ctypes.byref(peer), name), name)

    def channel(self, name: bytes) -> Channel | None:
        """Return the channel of a name, dialled here or by a peer; ``None`` while there is none."""
        self._take_accepted()
        return self._channels.get(name)

    @property
    def num_refused(self) -> int:
        """Connections that were refused: foreign, replayed or late."""
        return int(self._progress.num_refused) if self.handle else 0

    @property
    def num_bytes(self) -> int:
        """Bytes that were written to and read from rails."""
        return int(self._progress.num_bytes) if self.handle else 0

    def close(self) -> None:
        """Close all channels and leave the board; requests that are not done fail. May be called again."""
        if self.handle is None or os.getpid() != self._pid:
            return
        self._take_accepted()
        closing, end = list(self._channels.values()), time.monotonic() + CLOSING_S
        for channel in closing:
            channel.begin_close()
        for channel in closing:
            self.wait_until(lambda channel=channel: channel.is_closed, max(0.0, end - time.monotonic()))  # type: ignore[misc]
        self.failure = self.failure or ClosedError(f"the endpoint of worker {self.worker} was closed")
        with self._changing:
            handle, self.handle = self.handle, None
        while self._num_waiting:
            time.sleep(_PAUSE_S)
        if self._callbacks.is_alive() and self._callbacks is not threading.current_thread():
            self._callbacks.join()
        with contextlib.ExitStack() as nothing_is_posted:
            for channel in closing:
                nothing_is_posted.enter_context(channel.posting)
            if handle:
                functions()["close"](handle)
        _running.discard(self)
        for channel in closing:
            channel.settle()

    def scheduler(self) -> int:
        """Return a scheduler of the engine for a channel of which all rails are connected; for measurements."""
        return int(functions()["scheduler"](self.handle))

    def __exit__(self, *_: object) -> None:
        self.close()

    # What follows is for channels.

    def wait_until(self, condition: Callable[[], bool], limit_s: float) -> bool:
        """Wait for what changes in the engine, at most ``limit_s``; return whether it has happened."""
        end = time.monotonic() + limit_s
        while True:
            with self._changing:
                if (handle := self.handle) is not None:
                    self._num_waiting += 1
            try:
                seen = self._progress.changes if handle else 0
                has_happened, left_s = condition(), end - time.monotonic()
                if has_happened or left_s <= 0 or handle is None:
                    return has_happened
                if self.is_polled:
                    self.poll()
                    time.sleep(_PAUSE_S)
                else:
                    functions()["wait"](handle, seen, int(1e9 * min(left_s, _SLICE_S)))
            finally:
                with self._changing:
                    self._num_waiting -= handle is not None

    def begin_callbacks(self) -> None:
        """Begin to call ``on_done`` of requests, which a thread of Python does unless the endpoint is polled."""
        with self._changing:
            if not self.is_polled and not self._callbacks.is_alive() and self.handle:
                self._callbacks.start()

    def _call_back(self) -> None:
        num_settled = 0
        try:
            while self.handle is not None:
                if (num_done := self._progress.num_done) == num_settled:
                    self.wait_until(lambda: self.handle is None or self._progress.num_done != num_done, _SLICE_S)
                    continue
                num_settled = num_done
                for channel in list(self._channels.values()):
                    channel.settle()
        except Exception as error:  # noqa: BLE001  handed to all who wait
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        """Fail all requests: a callback has raised."""
        self.failure = error
        for channel in list(self._channels.values()):
            channel.give_up(f"{error}; ")

    def _add(self, handle: int, name: bytes) -> Channel:
        channel = Channel(self, handle, name)
        with self._changing:
            for other in [other for other, each in self._channels.items() if each.is_closed]:
                del self._channels[other]
            self._channels[name] = channel
        return channel

    def _take_accepted(self) -> bool:
        """Take the channels that peers have connected; return whether any waits for ``accept``."""
        while self._listen and self.handle and (handle := functions()["accept"](self.handle, self._listen)):
            name = ctypes.string_at(handle + ChannelState.name.offset, NAME_BYTES)
            self._accepted.append(self._add(handle, name))
        return bool(self._accepted)

    def _check_open(self) -> None:
        if self.failure is not None:
            raise self.failure
