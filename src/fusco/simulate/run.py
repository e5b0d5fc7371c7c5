"""Simulation of one collective: a tier, a system, a cluster, the rows that must move."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import numpy as np

from fusco.core.compiled import compiled
from fusco.planner.balancer import BALANCERS
from fusco.simulate.cluster import CONSTANTS, Cluster, check_same_shape
from fusco.simulate.demand import Demand
from fusco.simulate.flows import MOST_FLOWS, FloatArray, Flows, Hop, Outcome, Program, lay_out, run
from fusco.simulate.forwarding import Call, expert_rows
from fusco.simulate.links import LinkTable
from fusco.simulate.result import BalancerLoad, ConstantUsed, Copies, LinkLoad, RankSpan, Samples, SimulationResult
from fusco.simulate.systems import system

Tier = Literal["bound", "fluid", "slices"]
_MOST_DETAILED = 1024  # ranks up to which a result has all links and spans
_MOST_SAMPLED = 256  # links that samples show one by one


def simulate(
    cluster: Cluster, demand: Demand, name: str = "fusco", call: Call = "dispatch", tier: Tier = "fluid"
) -> SimulationResult:
    """Simulate a system's dispatch or combine on a cluster.

    Args:
        cluster: its ranks must be the demand's.
        demand: rows that must move.
        name: of ``SYSTEMS``.
        call: ``"dispatch"`` or ``"combine"``.
        tier: ``"bound"``: busiest links, for any size; ``"fluid"``: max-min fair rates of whole flows; ``"slices"``:
            of slices, so that pipelines fill and drain.

    Raises:
        ValueError: if shapes differ, the system is unknown, or a tier has too many flows, with one that answers.
    """
    check_same_shape(cluster, demand.topology)
    table, of = LinkTable(cluster), system(name)
    program = of.build(demand, cluster, call)
    if call == "dispatch":
        program = replace(program, start_us=program.start_us + cluster.plan_us)
    if cluster.core_gbs:
        program = with_cores(program, demand, call, has_pool=of.balancer is not None)
    hop_bytes = [_link_bytes(hop, table) for hop in program.hops]
    if tier == "bound":
        makespan_us, outcome, flows = bound_us(program, hop_bytes, table), None, None
    else:
        flows = _checked_flows(program, table, cluster, tier)
        outcome = run(flows, table)
        makespan_us = outcome.makespan_us
    run_of = _Run(cluster, table, program, np.sum(hop_bytes, axis=0), flows, outcome, makespan_us + cluster.end_us)
    return _result(run_of, demand, name, call, tier)


def _checked_flows(program: Program, table: LinkTable, cluster: Cluster, tier: str) -> Flows:
    slice_bytes = max(1, round(cluster.slice_mb * 1e6)) if tier == "slices" else None
    if (num_flows := program.num_slices(slice_bytes)) > MOST_FLOWS:
        is_fluid = tier == "fluid" or program.num_flows > MOST_FLOWS
        others = "tier bound answers" if is_fluid else "tier fluid answers, or larger slices"
        raise ValueError(f"{num_flows:,} flows are too many for tier {tier}, at most {MOST_FLOWS:,}: {others}")
    return lay_out(program, table, slice_bytes)


def _link_bytes(hop: Hop, table: LinkTable) -> FloatArray:
    """Return the bytes that a hop has for each link, float64 (L,)."""
    total = np.zeros(len(table.capacity))
    for column in table.columns(hop.kind, hop.src, hop.dst, hop.via, hop.until):
        _add_bytes(total, column, hop.num_bytes)
    return total


@compiled()
def _add_bytes(total: Any, links: Any, num_bytes: Any) -> None:
    for flow in range(len(links)):
        if links[flow] >= 0:
            total[links[flow]] += num_bytes[flow]


def bound_us(program: Program, hop_bytes: list[FloatArray], table: LinkTable) -> float:
    """Return the time of a program whose phases take turns, each as long as its busiest link, and their latencies.

    Hops of which one waits for the other are two phases. What is pipelined is one, and so are hops in which a rank
    waits for its own flows alone: for these systems no run is shorter.
    """
    levels = [0] * len(program.hops)
    for _ in program.hops:  # hops may wait for later ones
        levels = [
            max((levels[each] + 1 for each in hop.after if _is_phase(hop, program.hops[each])), default=0)
            for hop in program.hops
        ]
    total_us = program.start_us
    for level in range(max(levels, default=0) + 1):
        chosen = [i for i, each in enumerate(levels) if each == level]
        if chosen:
            total_us += float((np.sum([hop_bytes[i] for i in chosen], axis=0) / table.capacity).max(initial=0.0))
            total_us += max(program.hops[i].latency_us for i in chosen)
    return total_us


def _is_phase(hop: Hop, earlier: Hop) -> bool:
    return hop.waits != "ends" and not (hop.is_sliced and earlier.is_sliced)


class _Run(NamedTuple):
    cluster: Cluster
    table: LinkTable
    program: Program
    link_bytes: FloatArray
    flows: Flows | None
    outcome: Outcome | None
    makespan_us: float


def _result(of: _Run, demand: Demand, name: str, call: Call, tier: Tier) -> SimulationResult:
    cluster, traffic = of.cluster, demand.traffic_with(of.cluster.nic_shares)
    alone_us = of.link_bytes / of.table.capacity
    busiest = int(alone_us.argmax())
    binds = of.table.link(busiest).name
    is_detailed = demand.topology.world_size <= _MOST_DETAILED
    duplicated = system(name).has_duplicates
    bound_ms, makespan_ms = float(alone_us[busiest]) / 1e3, of.makespan_us / 1e3
    rows_by_rank = _by_rank(demand)
    names = BALANCERS if demand.topology.num_nodes > 1 else {}
    return SimulationResult(
        title=f"{name} on {cluster.name}, {call}: {makespan_ms:.3g} ms; {binds} needs {bound_ms:.3g} ms alone",
        cluster=cluster.name,
        system=name,
        tier=tier,
        call=call,
        traffic=demand.name,
        ranks=demand.topology.world_size,
        nodes=demand.topology.num_nodes,
        ranks_per_node=demand.topology.ranks_per_node,
        tokens=int(demand.num_tokens.sum()),
        bytes_per_row=demand.bytes_per_row,
        skew=demand.skew,
        makespan_ms=makespan_ms,
        bound_ms=bound_ms,
        binds=binds,
        num_flows=len(of.flows.hop) if of.flows else 0,
        num_updates=of.outcome.num_updates if of.outcome else 0,
        links=_links(of, alone_us, is_detailed=is_detailed),
        spans=_spans(of) if is_detailed else [],
        node_bytes_before=demand.node_bytes(has_duplicates=True).tolist() if cluster.nodes <= _MOST_DETAILED else [],
        node_bytes_after=demand.node_bytes(has_duplicates=False).tolist() if cluster.nodes <= _MOST_DETAILED else [],
        expert_rows=demand.expert_rows.tolist(),
        expert_rows_by_rank=rows_by_rank,
        balancers={each: _balancer_load(each, demand, of, is_detailed=is_detailed) for each in names},
        nic_bound_bytes=round(traffic.bound * demand.bytes_per_row),
        copies=Copies(
            needed=demand.remote_pairs,
            sent=demand.remote_pairs if duplicated else demand.remote_rows,
            bound=demand.remote_rows,
        ),
        samples=_samples(of),
        constants=[ConstantUsed(name=each, **vars(cluster.constant(each))) for each in CONSTANTS],
    )


def _by_rank(demand: Demand) -> list[int]:
    if not len(demand.expert_rows):
        return []
    by_rank = np.bincount(demand.expert_to_rank, demand.expert_rows, demand.topology.world_size)
    return [int(rows) for rows in by_rank]


def _links(of: _Run, alone_us: FloatArray, *, is_detailed: bool) -> list[LinkLoad]:
    used = np.flatnonzero(of.link_bytes)
    if not is_detailed:  # the busiest of each kind and node
        best: dict[tuple[str, int | None], int] = {}
        for number in used[np.argsort(alone_us[used], kind="stable")].tolist():
            link = of.table.link(number)
            best[link.kind, link.node] = number
        used = np.array(sorted(best.values()), np.int64)
    peak = of.outcome.link_peak / of.table.capacity if of.outcome else np.zeros(len(alone_us))
    loads = []
    for number in used.tolist():
        link = of.table.link(number)
        loads.append(
            LinkLoad(
                name=link.name,
                kind=link.kind,
                rank=link.rank,
                node=link.node,
                bytes=float(of.link_bytes[number]),
                capacity_gbs=float(of.table.capacity[number]) / 1e3,
                bound_ms=float(alone_us[number]) / 1e3,
                busy_share=float(alone_us[number] / max(of.makespan_us, 1e-9)),
                peak_share=float(peak[number]),
            )
        )
    return loads


def _spans(of: _Run) -> list[RankSpan]:
    if of.outcome is None or of.flows is None:
        return []
    key = of.flows.hop * of.table.topology.world_size + of.flows.src
    order = np.argsort(key, kind="stable")
    keys, first = np.unique(key[order], return_index=True)
    if not len(keys):
        return []
    begin = np.minimum.reduceat(of.outcome.start_us[order], first)
    end = np.maximum.reduceat(of.outcome.end_us[order], first)
    hop, rank = np.divmod(keys, of.table.topology.world_size)
    columns = (rank.tolist(), hop.tolist(), (begin / 1e3).tolist(), (end / 1e3).tolist())
    return [
        RankSpan(rank=each, name=of.program.hops[number].name, start_ms=start, end_ms=stop)
        for each, number, start, stop in sorted(zip(*columns, strict=True))
    ]


def _balancer_load(name: str, demand: Demand, of: _Run, *, is_detailed: bool) -> BalancerLoad:
    traffic = demand.traffic_with(of.cluster.nic_shares)
    sent, received = demand.loads_by(name, of.cluster.nic_shares)
    most = float(max(sent.max(), received.max()))
    size = demand.bytes_per_row
    return BalancerLoad(
        send_bytes=(sent * size).tolist() if is_detailed else [],
        receive_bytes=(received * size).tolist() if is_detailed else [],
        over_bound=most / (traffic.bound or 1.0),
    )


def _samples(of: _Run) -> Samples | None:
    if of.outcome is None:
        return None
    used = np.flatnonzero(of.link_bytes)
    links = [of.table.link(number) for number in used.tolist()]
    names = [link.name for link in links]
    if len(names) > _MOST_SAMPLED:
        names = [f"{link.kind} of node {link.node}" if link.node is not None else link.kind for link in links]
    if len(set(names)) > _MOST_SAMPLED:
        names = [link.kind for link in links]
    columns: defaultdict[str, int] = defaultdict(lambda: len(columns))
    to_column = np.array([columns[each] for each in names], np.int64)
    step_us = of.outcome.sample_us
    last = int(np.ceil(of.outcome.makespan_us / step_us)) if step_us else 0
    gbs = np.zeros((last, len(columns)))
    for i in range(last):
        gbs[i] = np.bincount(to_column, of.outcome.samples[i][used], len(columns)) / step_us / 1e3
    return Samples(step_ms=step_us / 1e3, links=list(columns), gbs=np.round(gbs, 3).tolist())


def with_cores(program: Program, demand: Demand, call: Call, *, has_pool: bool) -> Program:
    """Add what fusco's ranks do with each row, at the same time as the network carries others.

    Each byte that a rank sends to another node counts once, and so does each of the experts' rows, and in a combine of
    the sums by rank. With ``has_pool`` a dispatch begins with a pass over a rank's own tokens, to where its node reads
    them, and a combine ends with one, which adds the sums of all nodes.
    """
    size, ranks = demand.bytes_per_row, np.arange(demand.topology.world_size)
    work = expert_rows(demand) * size
    for hop in program.hops:
        if hop.kind == "between":
            work = work + np.bincount(hop.src, hop.num_bytes, len(ranks)).astype(np.int64)
    if call == "combine" and has_pool:
        work = work + demand.rank_rows.sum(axis=0) * size
    hops = [*program.hops, Hop(name="move rows", kind="cores", src=ranks, dst=ranks, num_bytes=work)]
    last, own = len(hops), demand.num_tokens * size
    if has_pool and call == "combine":
        after = tuple(range(last))
        hops.append(Hop(name="add sums of nodes", kind="memory", src=ranks, dst=ranks, num_bytes=own, after=after))
    elif has_pool:
        hops = [hop if hop.after else replace(hop, after=(last,)) for hop in hops]
        hops.append(Hop(name="copy own rows", kind="memory", src=ranks, dst=ranks, num_bytes=own))
    return replace(program, hops=tuple(hops))
