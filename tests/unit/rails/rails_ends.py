"""Two endpoints over loopback addresses, as if on two hosts."""

import time
from contextlib import contextmanager

import numpy as np

from fusco.rails import Endpoint, Limits, Rail

RAILS = [Rail("lo", f"127.0.0.{i + 1}", (i,)) for i in range(3)]
LIMITS = Limits(chunk_bytes=64 * 1024, no_rail_s=1.5)
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
    """Let a rail of a channel fail, as a reset by the network does."""

    def drop():
        if rail in channel._connections:  # unless it has just failed at the other end
            channel.drop(channel._connections[rail], "cut", tells_peer=False)

    channel._host.loop.post(drop)
