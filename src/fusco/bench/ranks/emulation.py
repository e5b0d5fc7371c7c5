"""Emulate several hosts on one machine: NCCL treats ranks with different host ids as those of different machines."""

from __future__ import annotations

from collections.abc import Mapping

from fusco.core.topology import Topology

_HOST = "NCCL_HOSTID"
# Sockets over the loopback device, with the threads and connections that are fastest: 7 GB/s a rank instead of 3. A
# chunk is divided among connections, 64 KiB at least to each: with the default, 128 KiB, among two. 2 H200, ms for
# an exchange of 128, 1024 and 8192 rows of 14 KiB: 0.33, 2.33 and 19.0 with the default, 0.27, 1.62 and 12.6.
_NETWORK = {
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_NTHREADS": "8",
    "NCCL_NSOCKS_PERTHREAD": "8",
    "NCCL_P2P_NET_CHUNKSIZE": "524288",
    "NCCL_IB_DISABLE": "1",
}


def emulated_network(topology: Topology, inherited: Mapping[str, str], num_gpus: int = 0) -> list[dict[str, str]]:
    """Return each rank's environment variables, by which ranks of different nodes communicate over the network only.

    With one node there is nothing to set, unless ranks share ``num_gpus`` GPUs (0: unknown): NCCL refuses two ranks of
    a host on one GPU, so each is a host of its own then. Variables of the ``inherited`` environment take precedence,
    and are not set.

    >>> [variables["NCCL_HOSTID"] for variables in emulated_network(Topology((0, 0, 1, 1)), {})]
    ['fusco-node-0', 'fusco-node-0', 'fusco-node-1', 'fusco-node-1']
    >>> [variables["NCCL_HOSTID"] for variables in emulated_network(Topology((0, 0)), {}, num_gpus=1)]
    ['fusco-rank-0', 'fusco-rank-1']
    """
    is_shared = 0 < num_gpus < topology.world_size
    if topology.num_nodes == 1 and not is_shared:
        return [{} for _ in topology.rank_to_node]
    hosts = [f"rank-{rank}" if is_shared else f"node-{node}" for rank, node in enumerate(topology.rank_to_node)]
    wanted = [{_HOST: f"fusco-{host}", **_NETWORK} for host in hosts]
    return [{name: value for name, value in rank.items() if name not in inherited} for rank in wanted]


def describe_emulation(topology: Topology, inherited: Mapping[str, str], num_gpus: int = 0) -> str:
    """Describe which variables ``emulated_network`` sets and which of the user's it keeps; empty with one node."""
    if topology.num_nodes == 1:
        return ""
    kept = [f"{name}={inherited[name]}" for name in (_HOST, *_NETWORK) if name in inherited]
    per_rank = emulated_network(topology, inherited, num_gpus)
    hosts = list(dict.fromkeys(rank[_HOST] for rank in per_rank if _HOST in rank))
    parts = [f"{_HOST}={' | '.join(hosts)}"] if hosts else []
    parts += [f"{name}={value}" for name, value in per_rank[0].items() if name != _HOST]
    return f"set: {', '.join(parts) or 'nothing'}" + (f"; kept: {', '.join(kept)}" if kept else "")
