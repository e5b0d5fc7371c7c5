"""The loop of an endpoint, in its thread or polled: waits for sockets and runs calls."""

from __future__ import annotations

import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack

READ, WRITE = select.EPOLLIN, select.EPOLLOUT
_JOIN_TIMEOUT_S = 5.0  # the thread never blocks
_PAUSE_S = 0.0002  # between polls of a wait


class Loop:
    """Runs handlers of sockets and posted calls in one thread, so that they need no locks.

    That is its thread after ``start``, or else the thread that calls ``poll``, in which posted calls run at once.
    """

    def __init__(self, step: Callable[[float], float], fail: Callable[[Exception], None]) -> None:
        """Make the loop, which calls ``step`` after all events with the time.

        It returns the seconds until it must be called again. ``fail`` gets an error that is no socket's; the loop ends.
        """
        self._step, self._fail = step, fail
        with ExitStack() as undo:
            self._epoll = undo.enter_context(select.epoll())
            self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            undo.callback(os.close, self._wake)
            self._epoll.register(self._wake, READ)
            undo.pop_all()
        self._handlers: dict[int, Callable[[int], None]] = {}
        self._calls: deque[Callable[[], None]] = deque()
        self._is_asleep = self._ends = False
        self._thread: threading.Thread | None = None

    def start(self, name: str) -> None:
        """Start a thread of that name; ``RuntimeError`` if that fails."""
        thread = threading.Thread(target=self._run, name=name, daemon=True)
        thread.start()
        self._thread = thread

    def poll(self) -> None:
        """Handle what has happened, without waiting."""
        self._step(time.monotonic())
        self._handle(self._epoll.poll(0))

    def wait(self, event: threading.Event, limit_s: float) -> bool:
        """Wait for an event that a handler sets, at most ``limit_s``; return whether it is set."""
        end = time.monotonic() + limit_s
        while self._thread is None and not event.is_set() and time.monotonic() < end:
            self.poll()
            time.sleep(_PAUSE_S)
        return event.wait(limit_s if self._thread else 0)

    def post(self, call: Callable[[], None]) -> None:
        """Run a call in the thread; any thread may post, unless the loop is polled."""
        if self._thread is None:
            call()
            return
        self._calls.append(call)
        if self._is_asleep:
            os.eventfd_write(self._wake, 1)

    def watch(self, fd: int, events: int, handler: Callable[[int], None]) -> None:
        """Call ``handler`` with the events of a descriptor; replaces earlier ones of the descriptor."""
        if fd in self._handlers:
            self._epoll.modify(fd, events)
        else:
            self._epoll.register(fd, events)
        self._handlers[fd] = handler

    def forget(self, fd: int) -> None:
        """Watch a descriptor no more; before it is closed."""
        if self._handlers.pop(fd, None) is not None and not self._epoll.closed:
            self._epoll.unregister(fd)

    def close(self) -> None:
        """End the thread and wait for it."""
        if not self._ends:
            self.post(self._end)
            if self._thread:
                self._thread.join(_JOIN_TIMEOUT_S)
            self._epoll.close()
            os.close(self._wake)

    def _end(self) -> None:
        self._ends = True

    def _run(self) -> None:
        try:
            while not self._ends:
                wait_s = self._step(time.monotonic())
                self._is_asleep = True  # before the calls are looked at, so that none is missed
                events = self._epoll.poll(0 if self._calls else wait_s)
                self._is_asleep = False
                self._handle(events)
                while self._calls:
                    self._calls.popleft()()
        except Exception as error:  # noqa: BLE001  handed to all who wait
            self._fail(error)

    def _handle(self, events: list[tuple[int, int]]) -> None:
        for fd, mask in events:
            if fd == self._wake:
                os.eventfd_read(self._wake)
            elif (handler := self._handlers.get(fd)) is not None:  # another handler may have closed it
                handler(mask)
