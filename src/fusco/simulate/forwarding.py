"""Programs of systems that forward rows within the receiving node: fusco, FUSCO as published, DeepEP.

Rows come from the library's own balancers and lanes. Combine is the mirror of dispatch: every hop backwards.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from fusco.core.lanes import Groups, IntArray, Lanes, Runs
from fusco.planner.lanes import DividedLanes
from fusco.planner.traffic import Traffic
from fusco.simulate.cluster import Cluster
from fusco.simulate.demand import Demand
from fusco.simulate.flows import MOST_FLOWS, Hop, Program

Call = Literal["dispatch", "combine"]


@dataclass(frozen=True, kw_only=True)
class Forwarding:
    """What a forwarding system does with a row.

    Attributes:
        balancer: name of fusco's balancer that chooses who sends and who forwards.
        copies: rows within the receiving node: one for each rank that needs it, or for each expert.
        is_pipelined: the second hop begins with the first slice, not with the last.
        passes: what is rearranged by passes over memory: nothing; experts' rows once; rows before each hop and after.
    """

    balancer: str
    copies: Literal["ranks", "experts"] = "ranks"
    is_pipelined: bool = True
    passes: Literal["none", "after", "all"] = "none"

    def program(self, demand: Demand, cluster: Cluster, call: Call) -> Program:
        """Return the hops of a dispatch or a combine."""
        traffic, chosen = demand.traffic_with(cluster.nic_shares), demand.chosen_by(self.balancer, cluster.nic_shares)
        num_runs = int(np.count_nonzero(traffic.num_rows))  # at least
        is_merged = num_runs > MOST_FLOWS and demand.exact_rank_rows is None and cluster.fabric.kind == "flat"
        runs = _merged_runs(traffic, chosen) if is_merged else traffic.lanes_of(chosen).runs
        size, latency = demand.bytes_per_row, cluster.latency_us
        held, own = self._distribution(demand, runs)
        is_remote = np.any(held) or len(runs.src)
        hops = [
            Hop(
                name="rows between nodes",
                kind="between",
                src=runs.src,
                dst=runs.forwarder,
                via=runs.carrier,
                num_bytes=runs.num_rows * size,
                latency_us=latency,
                is_sliced=self.is_pipelined,
                is_proportional=self.is_pipelined,
                stands_for=num_runs if is_merged else 0,
            ),
            _matrix(held * size, demand, name="rows to their ranks", latency_us=latency, is_sliced=self.is_pipelined),
            _matrix(own * size, demand, name="own rows to their ranks", latency_us=latency),
        ]
        # A hop waits for what arrives at its rank; in two collectives in turn, so do the node's own rows.
        after: dict[int, tuple[int, ...]] = {1: (0,), 2: () if self.is_pipelined else (0,)} if is_remote else {}
        if call == "combine":
            hops = [_reversed(hop) for hop in hops]
            after = {0: (1,) if self.is_pipelined else (1, 2)} if is_remote else {}
        hops = [replace(hop, after=after.get(i, ())) for i, hop in enumerate(hops)]
        if self.passes != "none":
            hops = self._with_passes(hops, demand, call)
        return Program(hops=tuple(hops), start_us=cluster.start_us)

    def _distribution(self, demand: Demand, runs: Runs) -> tuple[IntArray, IntArray]:
        """Return the rows from each rank that holds them to the local ranks that need them: (R, L), received and own.

        A run has the mean of its source's rows for the node.
        """
        topology = demand.topology
        node_to_ranks, nodes = np.array(topology.node_to_ranks), np.array(topology.rank_to_node)
        shape = (topology.world_size, topology.ranks_per_node)
        held = np.zeros(shape)
        copies = demand.rank_copies if self.copies == "ranks" else demand.expert_copies
        exact = demand.exact_rank_rows if self.copies == "ranks" else demand.exact_pair_rows
        ranks = np.arange(topology.world_size)
        if exact is None:  # all ranks of a node need as much
            received = np.bincount(runs.forwarder, runs.num_rows, topology.world_size)
            share = copies / topology.ranks_per_node
            held += received[:, None] * share
            own = np.repeat(demand.node_rows[ranks, nodes][:, None] * share, shape[1], axis=1)
        else:
            needed = exact[runs.src[:, None], node_to_ranks[runs.node]]
            part = runs.num_rows / np.maximum(demand.node_rows[runs.src, runs.node], 1)
            np.add.at(held, runs.forwarder, needed * part[:, None])
            own = exact[ranks[:, None], node_to_ranks[nodes]].astype(np.float64)
        return np.rint(held).astype(np.int64), np.rint(own).astype(np.int64)

    def _with_passes(self, hops: list[Hop], demand: Demand, call: Call) -> list[Hop]:
        """Insert passes over memory: before the hop between nodes, before and after the one within nodes."""
        ranks = np.arange(demand.topology.world_size)
        expert_bytes = expert_rows(demand) * demand.bytes_per_row
        between = next(hop for hop in hops if hop.kind == "between")
        sender = between.src if call == "dispatch" else between.dst
        sent = np.bincount(sender, between.num_bytes, len(ranks)).astype(np.int64)

        def memory(name: str, size: IntArray, after: tuple[int, ...]) -> Hop:
            return Hop(name=name, kind="memory", src=ranks, dst=ranks, num_bytes=size, after=after)

        if call == "dispatch":
            rows, to_ranks, own = hops
            if self.passes == "after":
                return [*hops, memory("rearrange by expert", expert_bytes, (1, 2))]
            return [
                memory("pack rows", sent, ()),
                replace(rows, after=(0,)),
                memory("pack by rank", expert_bytes, (1,)),
                replace(to_ranks, after=(2,)),
                replace(own, after=(2,)),
                memory("rearrange by expert", expert_bytes, (3, 4)),
            ]
        rows, to_holders, own = hops
        first = memory("rearrange by rank", expert_bytes, ())
        if self.passes == "after":
            return [first, replace(to_holders, after=(0,)), replace(own, after=(0,)), replace(rows, after=(1, 2))]
        return [
            first,
            replace(to_holders, after=(0,)),
            replace(own, after=(0,)),
            memory("sum by row", expert_bytes, (1, 2)),
            replace(rows, after=(3,)),
            memory("unpack rows", sent, (4,)),
        ]


def _merged_runs(traffic: Traffic, chosen: Groups | Lanes) -> Runs:
    """Return fewer runs that have the same rows for each pair of source and carrier, and for each forwarder.

    Between which of these ends they go, and the node that they are for, is not right.
    """
    sent, received = traffic.loads_of(chosen)
    src = carrier = np.arange(len(sent))
    if isinstance(chosen, Lanes):
        assert isinstance(chosen, DividedLanes), "lanes of fusco's balancer"
        hands = np.nonzero(chosen.handed)
        src, carrier = np.array(traffic.topology.node_to_ranks)[hands[0], hands[1:]]
        sent = chosen.handed[hands]
    sent_ends, received_ends = sent.cumsum(), received.cumsum()
    ends = np.union1d(sent_ends, received_ends)
    ends = ends[ends > 0]
    of, forwarder = np.searchsorted(sent_ends, ends), np.searchsorted(received_ends, ends)
    first = np.append(0, ends[:-1])
    return Runs(src[of], np.zeros_like(of), first, ends, carrier[of], forwarder)


def expert_rows(demand: Demand) -> IntArray:
    """Return the expert-major rows of each rank, int64 (R,)."""
    if demand.exact_pair_rows is not None:
        return demand.exact_pair_rows.sum(axis=0)
    per_node = demand.node_rows.sum(axis=0) * demand.expert_copies / demand.topology.ranks_per_node
    return np.rint(per_node[np.array(demand.topology.rank_to_node)]).astype(np.int64)


def _matrix(to_locals: IntArray, demand: Demand, *, name: str, latency_us: float, is_sliced: bool = False) -> Hop:
    """Return a hop within nodes, from bytes to local ranks (R, L); what stays on a rank is left out."""
    topology = demand.topology
    local = np.array(topology.rank_to_local)
    crossing = to_locals * (local[:, None] != np.arange(topology.ranks_per_node))
    src, to = np.nonzero(crossing)
    dst = np.array(topology.node_to_ranks)[np.array(topology.rank_to_node)[src], to]
    return Hop(
        name=name,
        kind="within",
        src=src,
        dst=dst,
        num_bytes=crossing[src, to],
        latency_us=latency_us,
        is_sliced=is_sliced,
    )


def _reversed(hop: Hop) -> Hop:
    name = {"rows between nodes": "sums between nodes"}.get(
        hop.name, hop.name.replace("to their ranks", "back as sums")
    )
    return replace(hop, name=name, src=hop.dst, dst=hop.src, via=None, until=hop.via)
