"""Run calls that may block forever in daemon threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any


def in_thread(function: Callable[[], Any]) -> Future[Any]:
    """Call a function in a daemon thread, which does not delay the interpreter's exit."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except Exception as error:  # noqa: BLE001  raised again by ``Future.result``
            future.set_exception(error)

    threading.Thread(target=run, name="fusco-connect", daemon=True).start()
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
