"""The plugin for NCCL without NCCL: started in this process, over loopback addresses, and its two kinds of peers.

``ENGINE_FLAGS`` adds flags of the compiler, such as those of sanitizers (``make sanitize``).
"""

from __future__ import annotations

import os
import resource
import socket
import time
from contextlib import contextmanager

import numpy as np
import pytest

from fusco.bench.rails.plugin import Plugin, PluginChannel
from fusco.rails import Address, Endpoint, Limits, Rail, binding
from fusco.rails.binding import library_path
from fusco.rails.nccl import nccl_plugin

RAILS = [Rail("lo", f"127.0.0.{i + 1}", (i,)) for i in range(3)]
LIMITS = Limits(chunk_bytes=64 * 1024, no_rail_s=1.0)
binding.FLAGS += os.environ.get("ENGINE_FLAGS", "").split()  # also for the endpoints of this process
SOME = np.random.default_rng(0).integers(0, 256, 4 << 20, dtype=np.uint8)


def message(number, size):
    """Bytes by number, of a size below 2 MB."""
    start = number * 7919 % (2 << 20)
    return SOME[start : start + size]


@contextmanager
def started(tmp_path, kind=Plugin, rails=RAILS, name="b", flags=(), **options):
    chosen = nccl_plugin(
        rails, **{"worker": 1, "policy": "fuselink", "limits": LIMITS, "board": tmp_path / name, **options}
    )
    with pytest.MonkeyPatch.context() as patch:
        for key, value in chosen.items():
            patch.setenv(key, value)
        patch.setenv("FUSCO_NCCL_THREADS", "2")
        plugin = kind(str(library_path(flags=flags)))
        try:
            yield plugin
        finally:
            plugin.finalize()


@contextmanager
def pairs(plugin, num=1):
    """Senders and their receivers, all comms of this process."""
    ends = []
    for _ in range(num):
        handle, listen = plugin.listen()
        sender = plugin.connect(handle)
        receiver = plugin.accept(listen)
        plugin.call(plugin.table.closeListen, listen)
        ends.append((PluginChannel(plugin, sender, is_sender=True), PluginChannel(plugin, receiver, is_sender=False)))
    try:
        yield ends
    finally:
        for sender, receiver in ends:
            sender.close()
            receiver.close()


def settle(requests, *channels, limit_s=20.0):
    end = time.monotonic() + limit_s
    while not all(each.done for each in requests):
        assert time.monotonic() < end, [each.done for each in requests]
        for channel in channels:
            channel.progress()
        time.sleep(20e-6)


def address_of(handle):
    """The address by which a Python endpoint connects to a handle; see ``struct handle``."""
    raw = handle.raw
    port, num_rails = int.from_bytes(raw[54:56], "little"), raw[56]
    rails = [(socket.inet_ntoa(raw[58 + 4 * i : 62 + 4 * i]), port) for i in range(num_rails)]
    worker, chunk_bytes = int.from_bytes(raw[52:54], "little"), int.from_bytes(raw[48:52], "little")
    return Address(worker, chunk_bytes, tuple(rails), raw[16:48])


@contextmanager
def python_sender(tmp_path, plugin):
    """A channel of a Python endpoint of another host, and the plugin's receiver of what it sends."""
    with Endpoint(worker=0, rails=RAILS, board=tmp_path / "a", limits=LIMITS, timeout_s=20.0) as endpoint:
        handle, listen = plugin.listen()
        channel = endpoint.connect(address_of(handle))
        receiver = PluginChannel(plugin, plugin.accept(listen), is_sender=False)
        yield channel, receiver
        plugin.call(plugin.table.closeListen, listen)
        receiver.close()


@contextmanager
def descriptors_left(num):
    """Let this process open only so many descriptors more."""
    free = [os.dup(0) for _ in range(num + 1)]
    for each in free:
        os.close(each)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free[-1], hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
