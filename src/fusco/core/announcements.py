"""Lines for a person: once for a command and all processes that it starts, and slow work only if it is slow."""

from __future__ import annotations

import errno
import hashlib
import multiprocessing
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from functools import lru_cache

_NO_SOCKET = -1  # in place of a descriptor


def announce(text: str) -> None:
    """Write a line to stderr, unless a process of this family has written the same, see ``is_first_to_say``."""
    if is_first_to_say(text) and sys.stderr is not None:
        sys.stderr.write(f"fusco: {text}\n")
        sys.stderr.flush()


def is_first_to_say(text: str) -> bool:
    """Claim a text for this process; false if it, a process with the same parent, or the parent has claimed it before.

    So one of several ranks speaks for all of them, whether torchrun or a benchmark has started them. A claim is the
    name of a socket that nothing connects to: it needs no file, and ends with the process that holds it.
    """
    claims = _claims()
    if text in claims:
        return False
    of_siblings, of_children = _hold(text, _parent_pid()), _hold(text, os.getpid())
    claims[text] = (of_siblings, of_children)
    return of_siblings is not None


@lru_cache(maxsize=1)
def _claims() -> dict[str, tuple[int | None, int | None]]:
    """What this process has said or left to another, with the sockets' descriptors, open until it ends."""
    return {}


def _parent_pid() -> int:
    """The process that asked for this one, which need not be the one that forked it."""
    parent = multiprocessing.parent_process()
    return os.getppid() if parent is None or parent.pid is None else parent.pid


def _hold(text: str, pid: int) -> int | None:
    """A socket's descriptor, with a name of Linux's abstract namespace; ``None`` if another process has that name."""
    try:
        namespace = os.readlink("/proc/self/ns/pid")  # process ids mean nothing in another
        digest = hashlib.sha256(f"{os.getuid()}/{namespace}/{pid}/{text}".encode()).hexdigest()[:32]
        with socket.socket(socket.AF_UNIX) as claim:
            claim.bind(f"\0fusco/{digest}")
            return claim.detach()
    except OSError as error:
        # Where there are no such sockets: better said twice than not at all.
        return None if error.errno == errno.EADDRINUSE else _NO_SOCKET


class SlowWork:
    """Work in several parts, announced once they have taken ``after_s`` seconds in all.

    Parts may be nested, and come from one thread at a time.

    Attributes:
        describe: gives the text, when it is needed.
        after_s: seconds that are not worth a word.

    """

    def __init__(self, describe: Callable[[], str], after_s: float = 1.0) -> None:
        self._describe, self._left_s = describe, after_s
        self._depth, self._start = 0, 0.0
        self._timer: threading.Timer | None = None

    def begin(self) -> None:
        """A part begins."""
        self._depth += 1
        if self._depth == 1:
            self._start = time.monotonic()
            self._timer = threading.Timer(max(0.0, self._left_s), lambda: announce(self._describe()))
            self._timer.daemon = True
            self._timer.start()

    def end(self) -> None:
        """It is done."""
        self._depth = max(0, self._depth - 1)
        if self._depth == 0 and self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._left_s -= time.monotonic() - self._start
