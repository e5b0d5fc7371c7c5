"""Programs of systems that exchange every message between its two ranks: NCCL, FAST, SpreadOut, padded, direct."""

from __future__ import annotations

import numpy as np

from fusco.core.lanes import IntArray
from fusco.schedule import Links
from fusco.schedule.cost import schedule_for
from fusco.schedule.stages import Transfers
from fusco.simulate.cluster import Cluster
from fusco.simulate.demand import Demand
from fusco.simulate.flows import Hop, Program
from fusco.simulate.forwarding import Call
from fusco.simulate.links import counterpart


def rank_bytes(demand: Demand, call: Call) -> IntArray:
    """Return the bytes from rank to rank with a copy for each expert, int64 (R, R)."""
    matrix = demand.pair_rows * demand.bytes_per_row
    return matrix if call == "dispatch" else np.ascontiguousarray(matrix.T)


def nccl(demand: Demand, cluster: Cluster, call: Call) -> Program:
    """All messages at once, between two passes; PXN sends with the NIC of the receiver's local rank."""
    return _with_passes(direct(demand, cluster, call, has_pxn=True), demand, call)


def direct(demand: Demand, cluster: Cluster, call: Call, *, has_pxn: bool = False) -> Program:
    """All messages at once, without passes over memory, each from its rank's NIC."""
    return _at_once(rank_bytes(demand, call), demand, cluster, has_pxn=has_pxn)


def padded(demand: Demand, cluster: Cluster, call: Call) -> Program:
    """All messages at once, each as long as the longest, as collectives of equal parts need them."""
    matrix = rank_bytes(demand, call).copy()
    np.fill_diagonal(matrix, 0)
    matrix[:] = matrix.max(initial=0)
    np.fill_diagonal(matrix, 0)
    return _at_once(matrix, demand, cluster, has_pxn=False)


def spread_out(demand: Demand, cluster: Cluster, call: Call) -> Program:
    """MPI's shifted diagonals: rank ``r`` sends to ``r + i`` when both have ended what they did for ``i - 1``."""
    matrix, nodes = rank_bytes(demand, call), np.array(demand.topology.rank_to_node)
    ranks, hops = np.arange(len(matrix)), []
    for shift in range(1, len(matrix)):
        dst, after = (ranks + shift) % len(matrix), (2 * shift - 4, 2 * shift - 3) if shift > 1 else ()
        is_local = nodes == nodes[dst]
        for kind, chosen in (("within", is_local), ("between", ~is_local)):
            src, to = ranks[chosen], dst[chosen]
            hops.append(
                Hop(
                    name=f"{shift} ranks on",
                    kind=kind,  # type: ignore[arg-type]
                    src=src,
                    dst=to,
                    num_bytes=matrix[src, to],
                    after=after,
                    waits="ends",
                    latency_us=cluster.stage_us,
                )
            )
    return Program(hops=tuple(hops), start_us=cluster.start_us)


def links_of(cluster: Cluster) -> Links:
    """Return a cluster's links as ``fusco.schedule`` takes them; pairs of a full mesh bind where they have a limit."""
    pairs = cluster.pair_gbs * (cluster.ranks_per_node - 1)
    return Links(
        latency_us=cluster.stage_us,
        internode_gbs=cluster.nic_gbs,
        intranode_gbs=min(cluster.nvl_gbs, pairs) if pairs else cluster.nvl_gbs,
        lane_links=cluster.nic_shares or None,
    )


def fast(demand: Demand, cluster: Cluster, call: Call) -> Program:
    """Balance within nodes, one-to-one stages between them, redistribute each stage behind the next one."""
    matrix = rank_bytes(demand, call).copy()
    np.fill_diagonal(matrix, 0)
    schedule = schedule_for(matrix, demand.topology, links_of(cluster))
    hops = [
        _hop(schedule.local, name="within nodes", kind="within"),
        _hop(schedule.balancing, name="balance", kind="within"),
    ]
    num_stages = schedule.stages.num_stages
    for stage in range(num_stages):
        internode = schedule.internode.select(schedule.internode.stage == stage)
        arrived = schedule.redistribution.select(schedule.redistribution.stage == stage)
        before = 1 if stage == 0 else 2 * stage
        crossing = _hop(
            internode, name=f"stage {stage}", kind="between", after=(before,), waits="all", latency_us=cluster.stage_us
        )
        hops += [crossing, _hop(arrived, name="redistribute", kind="within", after=(2 * stage + 2,))]
    return Program(hops=tuple(hops), start_us=cluster.start_us)


def _hop(transfers: Transfers, **fields: object) -> Hop:
    """Return transfers as flows, one for each pair of ranks; those of a rank to itself are left out."""
    moves = transfers.select(transfers.from_rank != transfers.to_rank)
    width = max(moves.from_rank.max(initial=0), moves.to_rank.max(initial=0)) + 1
    pair, index = np.unique(moves.from_rank * width + moves.to_rank, return_inverse=True)
    size = np.bincount(index, moves.num_bytes, len(pair)).astype(np.int64)
    return Hop(src=pair // width, dst=pair % width, num_bytes=size, **fields)  # type: ignore[arg-type]


def _at_once(matrix: IntArray, demand: Demand, cluster: Cluster, *, has_pxn: bool) -> Program:
    nodes = np.array(demand.topology.rank_to_node)
    is_local, is_own = nodes[:, None] == nodes, np.eye(len(nodes), dtype=np.bool_)
    latency = cluster.latency_us
    within = Hop.of_matrix(matrix, is_local & ~is_own, name="within nodes", kind="within", latency_us=latency)
    between = Hop.of_matrix(matrix, ~is_local, name="between nodes", kind="between", latency_us=latency)
    if has_pxn:
        via = counterpart(demand.topology, between.src, between.dst)
        between = Hop(**{**vars(between), "via": via})
    return Program(hops=(within, between), start_us=cluster.start_us)


def _with_passes(program: Program, demand: Demand, call: Call) -> Program:
    """Put a pass over all that a rank sends before, and one over all that it receives after."""
    matrix, ranks = rank_bytes(demand, call), np.arange(demand.topology.world_size)
    before = Hop(name="pack", kind="memory", src=ranks, dst=ranks, num_bytes=matrix.sum(axis=1))
    after = Hop(name="unpack", kind="memory", src=ranks, dst=ranks, num_bytes=matrix.sum(axis=0), after=(1, 2))
    exchange = tuple(Hop(**{**vars(hop), "after": (0,)}) for hop in program.hops)
    return Program(hops=(before, *exchange, after), start_us=program.start_us)
