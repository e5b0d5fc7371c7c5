"""Latency and bandwidth within and between the ranks of a job, as the cluster of ``fusco simulate --measure``."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from fusco.core.topology import Topology
from fusco.simulate.cluster import Cluster, Constant

_NUM_BYTES, _NUM_MESSAGES, _NUM_REPEATS = 16 << 20, 10, 3


def measure_cluster(group: dist.ProcessGroup, topology: Topology, device: str) -> Cluster:
    """Measure on all ranks at once and return the cluster, the same on all: the slowest rank counts.

    Between nodes every rank exchanges with its counterpart on the next node, within a node with the next local rank,
    in both directions at once. Where ranks have nobody to exchange with, the constant is left out.
    """
    rank = dist.get_rank(group)
    node, local = topology.rank_to_node[rank], topology.rank_to_local[rank]
    shape = (topology.num_nodes, topology.ranks_per_node)
    constants: dict[str, Constant] = {}

    def peers(step: int, kind: str) -> tuple[int, int]:
        node_of, local_of = (node + step) % shape[0], (local + step) % shape[1]
        next_rank = (
            topology.node_to_ranks[node_of][local] if kind == "between" else topology.node_to_ranks[node][local_of]
        )
        return next_rank, rank

    for kind, size, name in (("between", shape[0], "nic_gbs"), ("within", shape[1], "nvl_gbs")):
        if size < 2:
            continue
        to, source = peers(1, kind)[0], peers(-1, kind)[0]
        seconds = _slowest(group, partial(_exchange, group, to, source, _NUM_BYTES, device), device)
        where = f"measured: {_NUM_BYTES:,} bytes {kind} nodes, every rank both ways at once"
        constants[name] = Constant(
            value=_NUM_BYTES / seconds / 1e9, source=where.replace("within nodes", "within a node")
        )
        if kind == "between" or "latency_us" not in constants:
            small = _slowest(group, partial(_exchange, group, to, source, 8, device), device)
            constants["latency_us"] = Constant(value=small * 1e6, source=f"measured: 8 bytes {kind} nodes")
            constants["stage_us"] = Constant(value=small * 1e6, source="as latency_us")
    rows = torch.empty(_NUM_BYTES // 4096, 1024, dtype=torch.float32, device=device)
    order = torch.randperm(len(rows), device=device)
    seconds = _slowest(group, lambda: rows.index_select(0, order), device)
    constants["memory_gbs"] = Constant(
        value=rows.nbytes / seconds / 1e9, source="measured: index_select of rows of 4096 bytes"
    )
    return Cluster(name="measured", nodes=shape[0], ranks_per_node=shape[1], constants=constants)


def _exchange(group: dist.ProcessGroup, to: int, source: int, num_bytes: int, device: str) -> None:
    sent, received = (torch.empty(num_bytes, dtype=torch.uint8, device=device) for _ in range(2))
    ranks = [dist.get_global_rank(group, each) for each in (to, source)]
    operations = [dist.P2POp(dist.isend, sent, ranks[0], group), dist.P2POp(dist.irecv, received, ranks[1], group)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()


def _slowest(group: dist.ProcessGroup, work: Callable[[], object], device: str) -> float:
    """Return the seconds of one call on the slowest rank, the least of some repetitions."""
    best = float("inf")
    for _ in range(_NUM_REPEATS):
        work()
        dist.barrier(group)
        _synchronize(device)
        start = time.perf_counter()
        for _ in range(_NUM_MESSAGES):
            work()
        _synchronize(device)
        took = torch.tensor([(time.perf_counter() - start) / _NUM_MESSAGES], device=device, dtype=torch.float64)
        dist.all_reduce(took, dist.ReduceOp.MAX, group)
        best = min(best, float(took))
    return best


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
