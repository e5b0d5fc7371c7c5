"""Latency and bandwidth within and between the ranks of a job, as the cluster of ``fusco simulate --measure``."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from fusco.bench.harness.links import exchange_messages
from fusco.bench.harness.stopwatch import RankTimer
from fusco.core.topology import Topology
from fusco.simulate.cluster import Cluster, Constant

_NUM_BYTES, _NUM_MESSAGES, _NUM_REPEATS = 16 << 20, 10, 3


def measure_cluster(group: dist.ProcessGroup, topology: Topology, device: str) -> Cluster:
    """Measure on all ranks at once and return the cluster, the same on all: the slowest rank counts.

    Between nodes every rank exchanges with its counterpart on the next node, within a node with the next local rank,
    in both directions at once. Where ranks have nobody to exchange with, the constant is left out.
    """
    rank, timer = dist.get_rank(group), RankTimer(group, device)
    node, local = topology.rank_to_node[rank], topology.rank_to_local[rank]
    constants: dict[str, Constant] = {}

    def seconds_of(work: Callable[[], object]) -> float:
        """Return the seconds of one call on the slowest rank, the least of some repetitions."""
        work()
        times = torch.tensor(timer.host_times_ms(work, _NUM_MESSAGES, _NUM_REPEATS), dtype=torch.float64, device=device)
        dist.all_reduce(times, dist.ReduceOp.MAX, group)
        return float(times.min()) / _NUM_MESSAGES / 1e3

    def exchanging(num_bytes: int, to: int, source: int) -> float:
        sent, received = (torch.empty(num_bytes, dtype=torch.uint8, device=device) for _ in range(2))
        return seconds_of(lambda: exchange_messages(group, [(to, sent)], [(source, received)]))

    counterparts = [ranks[local] for ranks in topology.node_to_ranks]
    for ring, own, where, name in (
        (counterparts, node, "between nodes", "nic_gbs"),
        (topology.node_to_ranks[node], local, "within a node", "nvl_gbs"),
    ):
        if len(ring) < 2:
            continue
        to, source = ring[(own + 1) % len(ring)], ring[own - 1]
        constants[name] = Constant(
            value=_NUM_BYTES / exchanging(_NUM_BYTES, to, source) / 1e9,
            source=f"measured: {_NUM_BYTES:,} bytes {where}, every rank both ways at once",
        )
        if "latency_us" not in constants:
            small_us = exchanging(8, to, source) * 1e6
            constants["latency_us"] = Constant(value=small_us, source=f"measured: 8 bytes {where}")
            constants["stage_us"] = Constant(value=small_us, source="as latency_us")
    rows = torch.empty(_NUM_BYTES // 4096, 1024, dtype=torch.float32, device=device)
    order = torch.randperm(len(rows), device=device)
    constants["memory_gbs"] = Constant(
        value=rows.nbytes / seconds_of(lambda: rows.index_select(0, order)) / 1e9,
        source="measured: index_select of rows of 4096 bytes",
    )
    return Cluster(
        name="measured", nodes=len(counterparts), ranks_per_node=topology.ranks_per_node, constants=constants
    )
