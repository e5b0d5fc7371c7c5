"""Calls that wait without a limit, made where nobody need wait for them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any


def in_thread(function: Callable[[], Any]) -> Future[Any]:
    """Call a function in a thread that nobody need wait for, not even the interpreter's end."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except Exception as error:  # noqa: BLE001  raised again wherever the result is asked for
            future.set_exception(error)

    threading.Thread(target=run, name="fusco-connect", daemon=True).start()
    return future


def within(limit_s: float, function: Callable[[], Any]) -> bool:
    """Call a function in a thread and wait for it, though no longer than this; whether it was over by then."""
    try:
        future = in_thread(function)
    except RuntimeError:  # the interpreter ends, and starts no threads any more
        function()
        return True
    if not wait([future], limit_s).done:
        return False
    future.result()  # raises what it raised
    return True
