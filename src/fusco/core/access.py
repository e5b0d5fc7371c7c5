"""Who may use a communicator: the process that made it, and one of its threads."""

from __future__ import annotations

import os
import threading
import weakref

import torch

from fusco.core.errors import ClosedError, ThreadError


class Access:
    """Keeps all but one thread of one process out of a communicator.

    The process is the one that made it: a process forked from it has copies of everything, but no part in anything. The
    thread is the first that calls a verb. Another one may follow it when it has ended, or has handed over. In a
    backward pass autograd's own threads may call verbs, too, as the pass was begun by a thread that waits for it.
    """

    def __init__(self, whose: str) -> None:
        """``whose`` communicator it is, in the words of an error."""
        self._whose, self._pid = whose, os.getpid()
        # Not the thread itself, which may be the one that holds the communicator.
        self._owner: weakref.ref[threading.Thread] | None = None
        self._owner_ident, self._owner_name = 0, ""  # of no thread
        self._under_way = threading.RLock()  # a thread may leave from within its own call, as signal handlers do
        self._user, self._operation = "", ""

    @property
    def is_own_process(self) -> bool:
        """Whether this is the process that made the communicator."""
        return os.getpid() == self._pid

    def using(self, operation: str) -> _Call:
        """A verb's call, to be entered; ``ClosedError`` in another process, ``ThreadError`` in a thread not its own."""
        return _Call(self, operation, is_for_owner=True)

    def alone(self, operation: str) -> _Call:
        """What any thread may do while no other is inside a call, to be entered; ``ThreadError`` if one is."""
        return _Call(self, operation, is_for_owner=False)

    def enter(self, operation: str, *, is_for_owner: bool) -> None:
        """A call begins."""
        if os.getpid() != self._pid:
            raise ClosedError(
                f"{operation} was called in process {os.getpid()}, but {self._whose} belongs to process {self._pid}, "
                f"which made it: processes forked from that one cannot use it"
            )
        if not self._under_way.acquire(blocking=False):
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
        """A call is over."""
        self._under_way.release()

    def hand_over(self) -> None:
        """Let another thread have it, the next one that calls a verb."""
        with self.using("hand_over"):
            self._owner, self._owner_ident, self._owner_name = None, 0, ""

    def _take_over(self, thread: threading.Thread, operation: str) -> None:
        if _is_autograds(thread):
            return
        owner = self._owner() if self._owner else None
        if owner and owner.is_alive():
            raise ThreadError(
                f"thread {thread.name!r} called {operation} on {self._whose}, which belongs to thread "
                f"{owner.name!r}, the first that used it: ranks could not tell whose call is whose. Give each "
                f"thread a communicator of its own, or call hand_over() in thread {owner.name!r} first"
            )
        self._owner, self._owner_ident, self._owner_name = weakref.ref(thread), threading.get_ident(), thread.name


class _Call:
    """A context that takes a microsecond; one made of a generator takes four."""

    __slots__ = ("_access", "_is_for_owner", "_operation")

    def __init__(self, access: Access, operation: str, *, is_for_owner: bool) -> None:
        self._access, self._operation, self._is_for_owner = access, operation, is_for_owner

    def __enter__(self) -> None:
        self._access.enter(self._operation, is_for_owner=self._is_for_owner)

    def __exit__(self, *_: object) -> None:
        self._access.leave()


def _is_autograds(thread: threading.Thread) -> bool:
    """Whether a thread is one of those of a device in which autograd runs backward passes; Python started none."""
    return isinstance(thread, threading._DummyThread) and torch._C._current_graph_task_id() != -1  # noqa: SLF001
