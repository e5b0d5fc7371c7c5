"""Two endpoints over loopback addresses, as if on two hosts."""

import ctypes
import os
import socket
import time
from contextlib import contextmanager, suppress

import numpy as np

from fusco.rails import Endpoint, Limits, Rail

RAILS = [Rail("lo", f"127.0.0.{i + 1}", (i,)) for i in range(3)]
LIMITS = Limits(chunk_bytes=64 * 1024, no_rail_s=1.5)
LIBC = ctypes.CDLL(None)
RANDOM = np.random.default_rng(0)


@contextmanager
def connected(tmp_path, policy="fuselink", **options):
    """Two endpoints, as if on two hosts, and the channel's two ends."""
    options = {"limits": LIMITS, "timeout_s": 20.0, **options}
    with (
        Endpoint(worker=0, rails=RAILS, policy=policy, board=tmp_path / "a", **options) as a,
        Endpoint(worker=1, rails=RAILS, policy=policy, board=tmp_path / "b", **options) as b,
    ):
        channel = a.connect(b.listen())
        yield channel, b.accept()


def random_bytes(size):
    return RANDOM.integers(0, 256, size, dtype=np.uint8)


def wait_for(condition, limit_s=5.0):
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, "timed out"
        time.sleep(0.005)


def cut(channel, rail):
    """Let a rail of a channel fail, as a reset by the network does; both ends are in this process."""
    address = RAILS[rail].address
    for number in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):
            if os.readlink(f"/proc/self/fd/{number}").startswith("socket:"):
                with socket.socket(fileno=os.dup(number)) as each:
                    if each.family == socket.AF_INET and each.getpeername()[0] == each.getsockname()[0] == address:
                        LIBC.connect(each.fileno(), bytes(16), 16)  # to AF_UNSPEC: disconnects
                        return
