"""Result of a simulation: what binds, loads of links, spans of ranks, traffic before and after deduplication."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class LinkLoad:
    """Load of a link.

    ``rank`` and ``node`` are what it belongs to (``None``: of a rail). ``busy_share`` is the part of the makespan in
    which it would be busy at its capacity; ``bound_ms`` the time that its bytes need alone.
    """

    name: str
    kind: str
    rank: int | None
    node: int | None
    bytes: float
    capacity_gbs: float
    bound_ms: float
    busy_share: float
    peak_share: float


@dataclass(frozen=True, kw_only=True)
class RankSpan:
    """A hop of a rank, from its first flow to its last."""

    rank: int
    name: str
    start_ms: float
    end_ms: float


@dataclass(frozen=True, kw_only=True)
class Samples:
    """Rates over time: ``gbs[i][j]`` is the mean rate of ``links[j]`` in sample ``i``, each ``step_ms`` long.

    Above 256 links there is one for each kind and node, the sum of its links (``"nic-out of node 3"``); above 256 of
    those one for each kind (``"nic-out"``).
    """

    step_ms: float
    links: list[str]
    gbs: list[list[float]]


@dataclass(frozen=True, kw_only=True)
class BalancerLoad:
    """Bytes of each rank's NIC under a balancer, and the busiest over the bound (1.0 is perfect)."""

    send_bytes: list[int]
    receive_bytes: list[int]
    over_bound: float


@dataclass(frozen=True, kw_only=True)
class Copies:
    """Rows between nodes: a copy for each (token, expert), those sent, and the least: one for each (token, node)."""

    needed: int
    sent: int
    bound: int


@dataclass(frozen=True, kw_only=True)
class ConstantUsed:
    """A constant of the cluster, its source, and the published rows that it was trained on."""

    name: str
    value: float
    source: str
    trained: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class SimulationResult:
    """One simulated dispatch or combine: what ``fusco simulate --json`` writes as a line, all figures predicted.

    Attributes:
        kind: ``"simulation"``, by which readers of JSON lines know it.
        title: one sentence with the finding: the time, and what binds.
        cluster, system, tier, call, traffic: names. ``tier`` is ``"bound"`` (busiest link of each hop), ``"fluid"``
            (max-min rates) or ``"slices"`` (the same, slice by slice).
        ranks, nodes, ranks_per_node: of the cluster.
        tokens: of all ranks. bytes_per_row: of one row.
        skew: exponent of Zipf's law by which experts were chosen; ``None`` for other traffic.
        makespan_ms: time of the slowest rank.
        bound_ms: time of the busiest link alone. binds: its name.
        num_flows, num_updates: of the simulation; 0 with tier ``"bound"``.
        links: every link with bytes; above 1,024 ranks the busiest of each kind and node.
        spans: of ranks, up to 1,024 ranks; empty with tier ``"bound"``.
        node_bytes_before, node_bytes_after: (N, N) bytes from node to node, a copy for each expert and for each node;
            above 1,024 nodes empty.
        expert_rows: (token, expert) pairs of each expert; empty if unknown.
        expert_rows_by_rank: pairs of the experts of each rank; empty if unknown.
        balancers: loads of NICs under each of fusco's balancers, by name; lists are empty above 1,024 ranks.
        nic_bound_bytes: the share of a NIC of the busiest node.
        copies: rows needed, sent and least.
        samples: rates over time; ``None`` with tier ``"bound"``.
        constants: of the cluster.
    """

    kind: str = "simulation"
    title: str
    cluster: str
    system: str
    tier: str
    call: str
    traffic: str
    ranks: int
    nodes: int
    ranks_per_node: int
    tokens: int
    bytes_per_row: int
    skew: float | None
    makespan_ms: float
    bound_ms: float
    binds: str
    num_flows: int
    num_updates: int
    links: list[LinkLoad]
    spans: list[RankSpan]
    node_bytes_before: list[list[int]]
    node_bytes_after: list[list[int]]
    expert_rows: list[int]
    expert_rows_by_rank: list[int]
    balancers: dict[str, BalancerLoad]
    nic_bound_bytes: int
    copies: Copies
    samples: Samples | None
    constants: list[ConstantUsed]
