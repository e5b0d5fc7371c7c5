"""``python streams.py receive ADDRESS PORT`` and ``send ADDRESS PORT BYTES [SOURCE [TOS]]``: one TCP stream, timed."""

from __future__ import annotations

import json
import socket
import sys
import time

CHUNK = bytes(256 << 10)


def receive(address: str, port: int) -> None:
    """Print the seconds from the first byte to the last, and the bytes."""
    with socket.create_server((address, port)) as listener:
        sys.stdout.write("listening\n")
        sys.stdout.flush()
        connection, _ = listener.accept()
        with connection:
            num_bytes, memory, start = 0, bytearray(len(CHUNK)), 0.0
            while read := connection.recv_into(memory):
                start = start or time.perf_counter()
                num_bytes += read
            sys.stdout.write(json.dumps({"seconds": time.perf_counter() - start, "bytes": num_bytes}))


def send(address: str, port: int, num_bytes: int, source: str = "", tos: int = 0) -> None:
    with socket.create_connection((address, port), timeout=20, source_address=(source, 0) if source else None) as peer:
        peer.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, tos)
        for _ in range(num_bytes // len(CHUNK)):
            peer.sendall(CHUNK)


if __name__ == "__main__":
    values = [int(value) if value.isdecimal() else value for value in sys.argv[2:]]
    {"receive": receive, "send": send}[sys.argv[1]](*values)
