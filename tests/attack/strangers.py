"""Strangers: connections to listeners of ranks that say what nobody asked them, or nothing at all."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
import time
from pathlib import Path
from random import Random
from types import TracebackType

_NUM_STRANGERS = 3
_MAX_SILENT = 20
# What a rank would believe if it came with the secret.
_SLANDER = {"secret": "x", "failure": {"peers": [0], "reason": "hearsay", "found_by": 1, "has_left": False}}


class Strangers:
    """Threads that visit, in a ``with`` block, every port that is named by a file in a folder."""

    def __init__(self, ports: Path, seed: int) -> None:
        self._ports = ports
        self._is_over = threading.Event()
        self._visits = [0] * _NUM_STRANGERS
        self._threads = [
            threading.Thread(target=self._roam, args=(i, Random(f"{seed}/{i}")), daemon=True)
            for i in range(_NUM_STRANGERS)
        ]

    @property
    def num_visits(self) -> int:
        """Connections that a listener took."""
        return sum(self._visits)

    def __enter__(self) -> Strangers:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def _roam(self, i: int, random: Random) -> None:
        silent: list[socket.socket] = []
        while not self._is_over.is_set():
            for port in sorted(int(entry.name) for entry in self._ports.iterdir()):
                with contextlib.suppress(OSError):
                    visitor = socket.create_connection(("127.0.0.1", port), timeout=0.2)
                    self._visits[i] += 1
                    _misbehave(visitor, random, silent)
            time.sleep(0.005)
            while len(silent) > _MAX_SILENT:
                silent.pop(0).close()
        for visitor in silent:
            visitor.close()


def _misbehave(visitor: socket.socket, random: Random, silent: list[socket.socket]) -> None:
    manner = random.choice(("bytes", "json", "http", "much", "silence", "half a line", "reset"))
    if manner == "silence":
        silent.append(visitor)
        return
    if manner == "half a line":
        visitor.sendall(b'{"secret": "')
        silent.append(visitor)
        return
    with visitor:
        if manner == "bytes":
            visitor.sendall(random.randbytes(random.randint(1, 5000)))
        elif manner == "json":
            request = random.choice(({}, [], 7, {"secret": None}, {"ask": "status"}, {"failure": {}}, _SLANDER))
            visitor.sendall(json.dumps(request).encode() + b"\n")
        elif manner == "http":
            visitor.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            visitor.recv(100)
        elif manner == "much":
            visitor.sendall(b"x" * (1 << 20))
        else:
            visitor.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            visitor.sendall(b"\0")
