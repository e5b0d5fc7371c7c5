"""Messages on stderr: once per command and all its processes, of slow work if it takes long; and fusco's logger."""

from __future__ import annotations

import errno
import hashlib
import logging
import multiprocessing
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from functools import lru_cache

_NO_SOCKET = -1  # instead of a descriptor
LEVEL_VARIABLE = "FUSCO_LOG"
LOGGER = logging.getLogger("fusco")


def announce(text: str) -> None:
    """Write a line to stderr unless a related process has written the same, see ``is_first_to_say``."""
    if is_first_to_say(text) and sys.stderr is not None:
        sys.stderr.write(f"fusco: {text}\n")
        sys.stderr.flush()


def is_first_to_say(text: str) -> bool:
    """Claim a text for this process; false if it, a process with the same parent, or the parent has claimed it before.

    So one of several ranks writes for all of them, whether torchrun or a benchmark has started them. A claim is the
    name of a bound socket that nothing connects to: it needs no file, and ends with the process that holds it.
    """
    claims = _claims()
    if text in claims:
        return False
    of_siblings, of_children = _hold(text, _parent_pid()), _hold(text, os.getpid())
    claims[text] = (of_siblings, of_children)
    return of_siblings is not None


@lru_cache(maxsize=1)
def _claims() -> dict[str, tuple[int | None, int | None]]:
    """Return the texts seen by this process, with the descriptors of their sockets, open until it ends."""
    return {}


def _parent_pid() -> int:
    """Return the process that requested this one, which is not always the one that forked it."""
    parent = multiprocessing.parent_process()
    return os.getppid() if parent is None or parent.pid is None else parent.pid


def _hold(text: str, pid: int) -> int | None:
    """Bind a socket in Linux's abstract namespace and return its descriptor; ``None`` if the name is in use."""
    try:
        namespace = os.readlink("/proc/self/ns/pid")  # process ids are unique within one namespace only
        digest = hashlib.sha256(f"{os.getuid()}/{namespace}/{pid}/{text}".encode()).hexdigest()[:32]
        with socket.socket(socket.AF_UNIX) as claim:
            claim.bind(f"\0fusco/{digest}")
            return claim.detach()
    except OSError as error:
        # Without such sockets, a text is written several times rather than not at all.
        return None if error.errno == errno.EADDRINUSE else _NO_SOCKET


class SlowWork:
    """Work in several parts, announced once they have taken ``after_s`` seconds in total.

    Parts may be nested. One thread at a time may begin and end them. ``describe`` returns the text to announce.
    """

    def __init__(self, describe: Callable[[], str], after_s: float = 1.0) -> None:
        self._describe, self._left_s = describe, after_s
        self._depth, self._start = 0, 0.0
        self._timer: threading.Timer | None = None

    def begin(self) -> None:
        """Begin a part."""
        self._depth += 1
        if self._depth == 1:
            self._start = time.monotonic()
            self._timer = threading.Timer(max(0.0, self._left_s), lambda: announce(self._describe()))
            self._timer.daemon = True
            self._timer.start()

    def end(self) -> None:
        """End the part begun last."""
        self._depth = max(0, self._depth - 1)
        if self._depth == 0 and self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._left_s -= time.monotonic() - self._start


def configure_logging() -> None:
    """Print messages from the level in ``FUSCO_LOG`` on to stderr; without it, the program's own handlers decide.

    Raises ``ValueError`` for a value that is no level of ``logging``.
    """
    name = os.environ.get(LEVEL_VARIABLE)
    if not name:
        return
    if name.upper() not in ("DEBUG", "INFO", "WARNING", "ERROR"):
        raise ValueError(f"{LEVEL_VARIABLE} must be DEBUG, INFO, WARNING or ERROR, got {name!r}")
    LOGGER.setLevel(name.upper())
    if not LOGGER.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("fusco: %(message)s"))
        LOGGER.addHandler(handler)
        LOGGER.propagate = False  # the root's handlers would print it again
