"""Which machine this process runs on, and how others reach it."""

from __future__ import annotations

import os
import socket
from pathlib import Path


def host_identity() -> str:
    """A name that two processes share if and only if they can share memory: host, boot and process namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{socket.gethostname()}/{boot}/{os.readlink('/proc/self/ns/pid')}"


def reachable_address(*, is_alone: bool) -> str:
    """An address of this machine; the loopback one if no other machine takes part."""
    return "127.0.0.1" if is_alone else socket.gethostbyname(socket.gethostname())
