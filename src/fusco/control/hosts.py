"""Which machine this process runs on, and how others reach it."""

from __future__ import annotations

import os
import socket
from pathlib import Path


def host_identity() -> str:
    """A name that two processes share if and only if they can share memory: host, boot and process namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{socket.gethostname()}/{boot}/{os.readlink('/proc/self/ns/pid')}"


# An address reserved for documentation (RFC 5737): the route to it is the default route.
_ELSEWHERE = "192.0.2.1"


def reachable_address(towards: str) -> str:
    """The address by which this machine reaches host ``towards``, and so by which others there reach it.

    On that host itself, and if its name stands for a loopback address there, the address of the default route.
    """
    address = "127.0.0.1"
    for target in (towards, _ELSEWHERE):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((socket.gethostbyname(target), 9))  # chooses a route; nothing is sent by it
                address = str(probe.getsockname()[0])
            except OSError:
                continue  # no such name, or no route
        if not address.startswith("127."):
            break
    return address
