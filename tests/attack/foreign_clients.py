"""Foreign TCP clients: they connect to the listening ports of ranks and send garbage, or nothing."""

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

_NUM_CLIENTS = 3
_MAX_IDLE = 20
# A failure report that a rank would accept if it had the secret.
_FORGED_REPORT = {"secret": "x", "failure": {"peers": [0], "reason": "hearsay", "found_by": 1, "has_left": False}}


class ForeignClients:
    """Threads that connect, in a ``with`` block, to every port that is the name of a file in a folder."""

    def __init__(self, ports: Path, seed: int) -> None:
        self._ports = ports
        self._is_over = threading.Event()
        self._connections = [0] * _NUM_CLIENTS
        self._threads = [
            threading.Thread(target=self._run, args=(i, Random(f"{seed}/{i}")), daemon=True)
            for i in range(_NUM_CLIENTS)
        ]

    @property
    def num_connections(self) -> int:
        """Connections that a listener accepted."""
        return sum(self._connections)

    def __enter__(self) -> ForeignClients:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def _run(self, i: int, random: Random) -> None:
        idle: list[socket.socket] = []
        while not self._is_over.is_set():
            for port in sorted(int(entry.name) for entry in self._ports.iterdir()):
                with contextlib.suppress(OSError):
                    client = socket.create_connection(("127.0.0.1", port), timeout=0.2)
                    self._connections[i] += 1
                    _send_garbage(client, random, idle)
            time.sleep(0.005)
            while len(idle) > _MAX_IDLE:
                idle.pop(0).close()
        for client in idle:
            client.close()


def _send_garbage(client: socket.socket, random: Random, idle: list[socket.socket]) -> None:
    message = random.choice(("bytes", "json", "http", "much", "nothing", "half a line", "reset"))
    if message == "nothing":
        idle.append(client)
        return
    if message == "half a line":
        client.sendall(b'{"secret": "')
        idle.append(client)
        return
    with client:
        if message == "bytes":
            client.sendall(random.randbytes(random.randint(1, 5000)))
        elif message == "json":
            request = random.choice(({}, [], 7, {"secret": None}, {"ask": "status"}, {"failure": {}}, _FORGED_REPORT))
            client.sendall(json.dumps(request).encode() + b"\n")
        elif message == "http":
            client.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            client.recv(100)
        elif message == "much":
            client.sendall(b"x" * (1 << 20))
        else:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.sendall(b"\0")
