"""Access control of a communicator: one process, and one of its threads at a time."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable

import torch

from fusco.core.errors import ClosedError, ThreadError


class Access:
    """Restricts a communicator to one thread of one process.

    The process is the one that made it; one forked from it has copies of the objects, but is not a rank. The thread is
    the first that calls a verb. Another one may follow when that one has ended, or has called ``hand_over``. In a
    backward pass autograd's threads may call verbs, too, as the thread that began the pass waits for it. After
    ``take_turns`` no thread owns it.
    """

    def __init__(self, whose: str) -> None:
        """``whose`` names the communicator in errors."""
        self._whose, self._pid = whose, os.getpid()
        # A weak reference, as the thread may hold the communicator.
        self._owner: weakref.ref[threading.Thread] | None = None
        self._owner_ident, self._owner_name = 0, ""  # of no thread
        self._has_turns = False
        self._under_way = threading.RLock()  # reentrant: a signal handler may close it during a call of its thread
        self._user, self._operation = "", ""
        self._at_end: Callable[[], object] | None = None

    @property
    def is_own_process(self) -> bool:
        """True in the process that made the communicator."""
        return os.getpid() == self._pid

    def using(self, operation: str) -> _Call:
        """Return a context for a verb's call; entering raises ``ClosedError`` or ``ThreadError``, see ``enter``."""
        return _Call(self, operation, is_for_owner=True)

    def alone(self, operation: str) -> _Call:
        """Return a context for a call that any thread may make while no other thread is inside one."""
        return _Call(self, operation, is_for_owner=False)

    def enter(self, operation: str, is_for_owner: bool = True) -> None:  # noqa: FBT001, FBT002  by name it takes longer
        """Begin a call.

        Raises:
            ClosedError: in a process that did not make the communicator.
            ThreadError: if another thread is inside a call, or, with ``is_for_owner``, owns the communicator.
        """
        if os.getpid() != self._pid:
            raise ClosedError(
                f"{operation} was called in process {os.getpid()}, but {self._whose} belongs to process {self._pid}, "
                f"which made it: processes forked from that one cannot use it"
            )
        if not self._under_way.acquire(False):  # noqa: FBT003  by name it takes twice as long
            raise ThreadError(
                f"thread {threading.current_thread().name!r} called {operation} on {self._whose} while "
                f"{self._operation} of thread {self._user!r} is under way; a communicator is for one thread"
            )
        try:
            if threading.get_ident() == self._owner_ident:
                self._user = self._owner_name
            else:
                thread = threading.current_thread()
                if is_for_owner:
                    self._take_over(thread, operation)
                self._user = thread.name
            self._operation = operation
        except BaseException:
            self._under_way.release()
            raise

    def leave(self) -> None:
        """End a call."""
        self._under_way.release()
        if self._at_end is not None and not self.interrupted:
            at_end, self._at_end = self._at_end, None
            at_end()

    @property
    def interrupted(self) -> str:
        """The call that this thread is in, for one that a signal handler makes; ``""`` if there is none."""
        return self._operation if self._under_way._is_owned() else ""  # type: ignore[attr-defined]  # noqa: SLF001

    def at_end(self, function: Callable[[], object]) -> None:
        """Call a function when the call that this thread is in ends."""
        self._at_end = function

    def hand_over(self) -> None:
        """Give up ownership; the next thread that calls a verb becomes the owner."""
        with self.using("hand_over"):
            self._owner, self._owner_ident, self._owner_name = None, 0, ""

    def take_turns(self) -> None:
        """Let all threads call verbs from now on, one at a time, in an order that they make the same on all ranks."""
        self.hand_over()
        self._has_turns = True

    def _take_over(self, thread: threading.Thread, operation: str) -> None:
        if self._has_turns or _is_autograds(thread):
            return
        owner = self._owner() if self._owner else None
        if owner and owner.is_alive():
            raise ThreadError(
                f"thread {thread.name!r} called {operation} on {self._whose}, which belongs to thread "
                f"{owner.name!r}, the first that used it: calls of several threads have no common order on all ranks. "
                f"Make one communicator per thread, or call hand_over() in thread {owner.name!r} first"
            )
        self._owner, self._owner_ident, self._owner_name = weakref.ref(thread), threading.get_ident(), thread.name


class _Call:
    """Context of a call. It takes a microsecond; one made from a generator takes four."""

    __slots__ = ("_access", "_is_for_owner", "_operation")

    def __init__(self, access: Access, operation: str, *, is_for_owner: bool) -> None:
        self._access, self._operation, self._is_for_owner = access, operation, is_for_owner

    def __enter__(self) -> None:
        self._access.enter(self._operation, self._is_for_owner)

    def __exit__(self, *_: object) -> None:
        self._access.leave()


def _is_autograds(thread: threading.Thread) -> bool:
    """Return whether autograd runs a backward pass in this thread, which Python did not start."""
    return isinstance(thread, threading._DummyThread) and torch._C._current_graph_task_id() != -1  # noqa: SLF001
