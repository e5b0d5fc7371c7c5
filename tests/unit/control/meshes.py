"""TCP meshes of threads that play ranks."""

from __future__ import annotations

import time

from fusco.control.tcp_transport import TcpTransport
from fusco.control.transport import Mesh

SECRET = "0123456789abcdef" * 2
LIMIT_S = 20.0


def transport_of(store_gather, peers=None):
    others = [rank for rank in range(store_gather.world_size) if rank != store_gather.rank]
    return TcpTransport(store_gather, others if peers is None else peers, "127.0.0.1", SECRET, "TCP mesh")


def mesh_of(store_gather, peers=None):
    return Mesh(transport_of(store_gather, peers))


def connecting_waits_by(store_gather, wait_until):
    """Replace the wait for connections, which follows the all-gather of addresses."""
    all_gather = store_gather.all_gather

    def gather(stage, value):
        values = all_gather(stage, value)
        store_gather.wait_until = wait_until
        return values

    store_gather.all_gather = gather


def exchange(mesh, message, peers):
    """Exchange messages in one round; return those received, by peer."""
    received = {peer: bytearray(len(message)) for peer in peers}
    mesh.begin(dict.fromkeys(peers, message), {peer: memoryview(memory) for peer, memory in received.items()})
    complete, deadline = [], time.monotonic() + LIMIT_S
    while not mesh.is_done:
        complete += mesh.poll()
        assert not mesh.transport.failure
        assert time.monotonic() < deadline
        time.sleep(0)
    assert sorted(complete) == sorted(peers)
    return {peer: bytes(memory) for peer, memory in received.items()}
