"""Run calls that may block forever in daemon threads."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any

# At the interpreter's exit a thread that returns from a call of PyTorch ends the process: it may not take the GIL any
# more, and C++ then terminates ("terminate called without an active exception"). A thread whose call is given up ends
# within this time. One whose call blocks does not return before the process has ended.
_EXIT_LIMIT_S = 0.5


def in_thread(function: Callable[[], Any]) -> Future[Any]:
    """Call a function in a daemon thread, which does not delay the interpreter's exit."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except Exception as error:  # noqa: BLE001  raised again by ``Future.result``
            future.set_exception(error)

    thread = threading.Thread(target=run, name="fusco-connect", daemon=True)
    thread.start()

    def at_exit() -> None:
        if thread.is_alive():  # in a forked process it is not
            wait([future], _EXIT_LIMIT_S)

    atexit.register(at_exit)
    future.add_done_callback(lambda _: atexit.unregister(at_exit))
    return future


def within(limit_s: float, function: Callable[[], Any]) -> bool:
    """Call a function in a thread and wait at most ``limit_s`` seconds; return whether it has returned by then."""
    try:
        future = in_thread(function)
    except RuntimeError:  # the interpreter is shutting down and starts no more threads
        function()
        return True
    if not wait([future], limit_s).done:
        return False
    future.result()  # raises what it raised
    return True
