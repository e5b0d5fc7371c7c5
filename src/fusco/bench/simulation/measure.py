"""Links, memory and cores of the ranks of a job, as the cluster of ``fusco simulate --measure``."""

from __future__ import annotations

import torch
import torch.distributed as dist

from fusco.bench.harness.links import exchange_messages
from fusco.bench.harness.model_job import gather
from fusco.bench.harness.stopwatch import RankTimer
from fusco.bench.simulation.cores import measure_machine
from fusco.control.bootstrap import host_identity
from fusco.core.topology import Topology
from fusco.simulate.cluster import Cluster, Constant

_NUM_BYTES, _NUM_MESSAGES, _NUM_REPEATS = 16 << 20, 10, 3
_REPEAT_S = 0.5  # of which a repetition has fewer messages: slow networks are measured in seconds


def measure_cluster(group: dist.ProcessGroup, topology: Topology, device: str) -> Cluster:
    """Measure on all ranks at once and return the cluster, the same on all: the slowest rank counts.

    Between nodes every rank exchanges with its counterpart on the next node, within a node with the next local rank,
    in both directions at once. Where ranks have nobody to exchange with, the constant is left out.
    """
    rank, timer = dist.get_rank(group), RankTimer(group, device)
    node, local = topology.rank_to_node[rank], topology.rank_to_local[rank]
    constants: dict[str, Constant] = {}

    def exchanging(num_bytes: int, to: int, source: int) -> float:
        sent, received = (torch.empty(num_bytes, dtype=torch.uint8, device=device) for _ in range(2))

        def exchange() -> None:
            exchange_messages(group, [(to, sent)], [(source, received)])

        num_messages = int(_REPEAT_S / timer.least_s(exchange, 1, 1))
        return timer.least_s(exchange, max(1, min(_NUM_MESSAGES, num_messages)), _NUM_REPEATS)

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
    machines = len({identity.split("/")[1] for identity in gather(group, host_identity())})  # by their boots
    cluster = Cluster(
        name="measured",
        nodes=topology.num_nodes,
        ranks_per_node=topology.ranks_per_node,
        machines=machines if machines < topology.num_nodes else 0,
        constants=constants,
    )
    return measure_machine(group, cluster, device)
