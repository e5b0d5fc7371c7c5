"""Run calls that may block forever in daemon threads, and limit what waits at the interpreter's exit take together."""

from __future__ import annotations

import atexit
import ctypes
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any

# At the interpreter's exit a thread that returns from a call of PyTorch ends the process: it may not take the GIL any
# more, and C++ then terminates ("terminate called without an active exception"). A thread whose call is given up ends
# within this time. One whose call blocks does not return before the process has ended.
_EXIT_LIMIT_S = 0.5
_LEAST_S = 0.1  # of a wait at exit after others have taken all of its limit: healthy work ends within this time

# Module state: threads, and the exit, are the process's.
_running: dict[Future[Any], tuple[threading.Thread, str]] = {}
_exit_began: list[float] = []


def in_thread(function: Callable[[], Any], what: str) -> Future[Any]:
    """Call a function in a daemon thread, which does not delay the interpreter's exit.

    ``what`` names the call in warnings. Raises ``RuntimeError`` if no thread can be started.
    """
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:  # noqa: BLE001  raised again by ``Future.result``
            future.set_exception(error)

    thread = threading.Thread(target=run, name="fusco-connect", daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        raise RuntimeError(f"no thread could be started for {what}: {error}") from error
    _running[future] = thread, what
    future.add_done_callback(lambda done: _running.pop(done, None))
    return future


def within(limit_s: float, function: Callable[[], Any], what: str) -> bool:
    """Call a function in a thread and wait at most ``limit_s`` seconds; return whether it has returned by then."""
    try:
        future = in_thread(function, what)
    except RuntimeError:  # the interpreter is shutting down and starts no more threads
        function()
        return True
    if not wait([future], limit_now(limit_s)).done:
        return False
    future.result()  # raises what it raised
    return True


def limit_now(limit_s: float) -> float:
    """Return the limit of a wait: at the interpreter's exit, less the time since the first wait there began.

    So the waits of many communicators at exit take as long together as the longest of them may alone.
    """
    if threading.main_thread().is_alive():
        return limit_s
    if not _exit_began:
        _exit_began.append(time.monotonic())
    return max(min(limit_s, _LEAST_S), limit_s - (time.monotonic() - _exit_began[0]))


@atexit.register
def _wait_at_exit() -> None:
    """Wait for all threads together; warn of those that have not returned."""
    pending = {future: what for future, (thread, what) in list(_running.items()) if thread.is_alive()}  # not if forked
    if late := wait(pending, limit_now(_EXIT_LIMIT_S)).not_done:
        names = ", ".join(sorted(pending[future] for future in late))
        warnings.warn(f"exiting while still running: {names}", RuntimeWarning, stacklevel=2)


def leak(thing: Any) -> None:
    """Keep an object, and everything that it references, alive until the process ends."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
