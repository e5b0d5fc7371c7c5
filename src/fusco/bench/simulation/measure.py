"""Links, memory and cores of the ranks of a job, as the cluster of ``fusco simulate --measure``."""

from __future__ import annotations

from typing import Literal

import torch
import torch.distributed as dist

from fusco.api.communicator import Communicator
from fusco.bench.harness.links import exchange_messages
from fusco.bench.harness.model_job import gather
from fusco.bench.harness.stopwatch import RankTimer
from fusco.bench.inputs.traffic import Workload
from fusco.control.bootstrap import host_identity
from fusco.core.placement import ExpertPlacement
from fusco.core.topology import Topology
from fusco.simulate.cluster import Cluster, Constant
from fusco.simulate.demand import Demand
from fusco.simulate.run import simulate

_NUM_BYTES, _NUM_MESSAGES, _NUM_REPEATS = 16 << 20, 10, 3
_REPEAT_S = 0.5  # of which a repetition has fewer messages: slow networks are measured in seconds
_FEW, _MANY, _NUM_CALLS = 8, 640, 10  # tokens of a rank; calls of which the fastest counts
_EXPERTS_OF_RANK, _TOPK, _HIDDEN = 16, 2, 2048
_FREE_GBS = 1e6  # of what does not bind
_NUM_ROUNDS = 3
_NETWORK_SHARE = 0.5  # of the time in which cores move as many rows within nodes
_CALLS: tuple[Literal["dispatch", "combine"], ...] = ("dispatch", "combine")


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


_MEMORY_BYTES = 16 << 20


def measure_machine(group: dist.ProcessGroup, cluster: Cluster, device: str) -> Cluster:
    """Return a cluster whose links are known with ``memory_gbs``, and on the CPU with what cores need.

    That is ``plan_us``, ``start_us`` and ``core_gbs``, unless no time is the cores'. A collective of all ranks.
    """
    timer = RankTimer(group, device)
    rows = torch.empty(_MEMORY_BYTES // 4096, 1024, dtype=torch.float32, device=device)
    order = torch.randperm(len(rows), device=device)
    rate = rows.nbytes / timer.least_s(lambda: rows.index_select(0, order), 10, 3) / 1e9
    cluster = cluster.with_values("measured: index_select of rows of 4096 bytes", memory_gbs=rate)
    return _with_cores(group, cluster, timer) if device == "cpu" else cluster


def _with_cores(group: dist.ProcessGroup, cluster: Cluster, timer: RankTimer) -> Cluster:
    """Of many rows, other nodes get no more than the network carries in half of the time of as many within nodes."""
    rank, topology = dist.get_rank(group), cluster.topology
    placement = ExpertPlacement.contiguous(_EXPERTS_OF_RANK * topology.world_size, topology.world_size)
    with Communicator(
        group,
        num_experts=placement.num_experts,
        num_topk=_TOPK,
        max_tokens_per_rank=_MANY,
        hidden=_HIDDEN,
        dtype=torch.float32,
        ranks_per_node=topology.ranks_per_node,
    ) as comm:

        def measured(ids: list[torch.Tensor]) -> tuple[Demand, list[float]]:
            """Return what moves, and the us of a dispatch and a combine."""
            x = torch.ones(len(ids[rank]), _HIDDEN, dtype=torch.float32, device="cpu")
            there = comm.dispatch(x, ids[rank])
            works = (lambda: comm.dispatch(x, ids[rank]), lambda: comm.combine(there.rows, there.handle))
            demand = Demand.of_routing("measured", ids, placement, topology, 4 * _HIDDEN)
            return demand, [1e6 * timer.least_s(work, 1, _NUM_CALLS) for work in works]

        few = measured(_ids(topology, _FEW, _FEW))
        _, within_us = measured(_ids(topology, _MANY, 0))
        even = Demand.of_routing("even", _ids(topology, _MANY, _MANY), placement, topology, 4 * _HIDDEN)
        network_us = 2 * even.remote_rows * even.bytes_per_row / topology.world_size / cluster.nic_gbs / 1e3
        share = min(1.0, _NETWORK_SHARE * sum(within_us) / network_us) if network_us else 1.0
        many = measured(_ids(topology, _MANY, round(share * _MANY)))

    def unpredicted_us(made: Cluster, of: Demand, took_us: list[float]) -> list[float]:
        """Return the part of each time that a cluster does not predict."""
        calls = zip(_CALLS, took_us, strict=True)
        return [us - 1e3 * simulate(made, of, "fusco", call, "bound").makespan_ms for call, us in calls]

    source, found = (
        f"measured: {_MANY} tokens a rank, {share:.0%} of them to all nodes",
        cluster.with_values("", core_gbs=0),
    )
    for _ in range(_NUM_ROUNDS):  # cores move few rows too, and many have a start
        dispatch_us, combine_us = (
            max(0.0, us) for us in unpredicted_us(found.with_values("", start_us=0, plan_us=0), *few)
        )
        start = {"start_us": combine_us, "plan_us": max(0.0, dispatch_us - combine_us)}
        cluster = cluster.with_values(f"measured: {_FEW} tokens a rank, less latencies", **start)
        free = cluster.with_values("", nic_gbs=_FREE_GBS, nvl_gbs=_FREE_GBS)
        cores_us, less_us = (sum(unpredicted_us(free.with_values("", core_gbs=gbs), *many)) for gbs in (_FREE_GBS, 1.0))
        if cores_us <= 0:
            return cluster
        found = cluster.with_values(source, core_gbs=(cores_us - less_us) / cores_us)
    return found


def _ids(topology: Topology, tokens: int, num_spread: int) -> list[torch.Tensor]:
    """Return the experts of each rank's tokens: any for the first ``num_spread``, those of its node for the others."""

    def drawn(of: Topology) -> list[torch.Tensor]:
        experts = ExpertPlacement.contiguous(_EXPERTS_OF_RANK * of.world_size, of.world_size)
        even = Workload(
            pattern="uniform", topology=of, placement=experts, tokens=tokens, hidden=_HIDDEN, num_topk=_TOPK
        )
        return [even.routing(rank).topk_idx for rank in range(of.world_size)]

    size = topology.ranks_per_node
    within = drawn(Topology.of_equal_nodes(size, size))
    return [
        torch.cat([spread[:num_spread], within[rank % size][num_spread:] + _EXPERTS_OF_RANK * (rank - rank % size)])
        for rank, spread in enumerate(drawn(topology))
    ]
