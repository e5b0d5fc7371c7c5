"""The thread of an endpoint: waits for sockets and runs calls."""

from __future__ import annotations

import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable

READ, WRITE = select.EPOLLIN, select.EPOLLOUT
_JOIN_TIMEOUT_S = 5.0  # the thread never blocks


class Loop:
    """Runs handlers of sockets and posted calls in one thread, so that they need no locks."""

    def __init__(self, name: str, step: Callable[[float], float], fail: Callable[[Exception], None]) -> None:
        """Make the loop; ``start`` starts its thread.

        Args:
            name: of the thread.
            step: is called after all events with the time; returns the seconds until it must be called again.
            fail: is called with an error that is no socket's; the loop then ends.
        """
        self._step, self._fail = step, fail
        self._epoll, self._wake = select.epoll(), os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._wake, READ)
        self._handlers: dict[int, Callable[[int], None]] = {}
        self._calls: deque[Callable[[], None]] = deque()
        self._is_asleep = self._ends = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def post(self, call: Callable[[], None]) -> None:
        """Run a call in the thread; any thread may post."""
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
                for fd, mask in events:
                    if fd == self._wake:
                        os.eventfd_read(self._wake)
                    elif (handler := self._handlers.get(fd)) is not None:  # another handler may have closed it
                        handler(mask)
                while self._calls:
                    self._calls.popleft()()
        except Exception as error:  # noqa: BLE001  handed to all who wait
            self._fail(error)
