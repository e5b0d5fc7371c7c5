"""A process of a benchmark that calls functions on request, one at a time."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager
from multiprocessing.connection import Connection
from typing import Any

_ENDING_S = 10.0


class Worker(AbstractContextManager["Worker"]):
    """A process that calls functions on a state of its own, one at a time; ``with`` ends it.

    ``make_state(*arguments)`` is called there first, and makes a context manager, which ends with the process.
    """

    limit_s = 120.0  # of a call

    def __init__(self, name: str, start_method: str, make_state: Callable[..., Any], *arguments: Any) -> None:
        context: Any = multiprocessing.get_context(start_method)
        self._name = name
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, make_state, arguments), daemon=True)
        self.process.start()
        theirs.close()

    def begin(self, function: Callable[..., object], *arguments: Any) -> None:
        """Begin ``function(state, *arguments)`` in the process; ``result`` waits for it.

        Raises ``RuntimeError`` if the process has died.
        """
        try:
            self._pipe.send((function, arguments))
        except OSError:
            raise RuntimeError(f"{self._name} has died") from None

    def is_done(self) -> bool:
        """Return whether ``result`` would return at once."""
        return bool(self._pipe.poll())

    def result(self) -> Any:
        """Return what the function has returned; ``RuntimeError`` if it raised or did not return within ``limit_s``."""
        if not self._pipe.poll(self.limit_s):
            raise RuntimeError(f"{self._name} has not finished within {self.limit_s:g} s")
        try:
            result, error = self._pipe.recv()
        except (EOFError, OSError):  # the latter if it had not read everything
            raise RuntimeError(f"{self._name} has died") from None
        if error:
            raise RuntimeError(f"{self._name}: {error}")
        return result

    def call(self, function: Callable[..., object], *arguments: Any) -> Any:
        """Call ``function(state, *arguments)`` in the process and return its result, as ``result`` does."""
        self.begin(function, *arguments)
        return self.result()

    def __exit__(self, *_: object) -> None:
        self._pipe.close()
        self.process.join(_ENDING_S)
        if self.process.is_alive():
            self.process.kill()


def _serve(pipe: Connection, make_state: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    with make_state(*arguments) as state:
        while True:
            try:
                function, arguments = pipe.recv()
            except EOFError:
                return
            try:
                pipe.send((function(state, *arguments), ""))
            except Exception:  # noqa: BLE001  told to the benchmark
                pipe.send((None, traceback.format_exc()))
