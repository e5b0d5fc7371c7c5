"""Balancers: choose which ranks send and receive, and so forwarders, from the traffic between nodes.

A balancer is a pure function from ``Traffic``, which all ranks know after an exchange of counts, to ``Lanes``, or to
``Groups``, with which every rank sends its rows. So all ranks compute the same ones without further communication.
Source: FUSCO section 3.4.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from fusco.core.compiled import compiled
from fusco.core.lanes import Groups, Lanes
from fusco.core.topology import Topology
from fusco.planner.lanes import balance_lanes
from fusco.planner.traffic import Traffic, received_by_group

# Sweeps of `balance_send_and_receive` over all nodes; on bimodal loads a fourth one changes nothing measurable.
_MAX_SWEEPS = 3


# A pure function that chooses who sends and who forwards which rows. All ranks call it with the same traffic.
Balancer = Callable[[Traffic], Groups | Lanes]


def checked_balancer(balancer: Balancer) -> Balancer:
    """Wrap a balancer: ``TypeError`` or ``ValueError`` unless it returns lanes or groups of the traffic."""
    if is_builtin(balancer):
        return balancer

    def checked(traffic: Traffic) -> Groups | Lanes:
        chosen, name = balancer(traffic), getattr(balancer, "__name__", type(balancer).__name__)
        if not isinstance(chosen, Groups | Lanes):
            raise TypeError(f"a balancer must return Groups or Lanes, got {type(chosen).__name__} from {name}")
        if chosen.topology != traffic.topology:
            kind = type(chosen).__name__.lower()
            raise ValueError(f"{name} returned {kind} of {chosen.topology} for traffic of {traffic.topology}")
        if isinstance(chosen, Lanes):
            chosen = Lanes.of_runs(chosen.topology, list(zip(*chosen.runs, strict=True)))
            if not np.array_equal(chosen.num_rows, traffic.rows_by_rank):
                src, node = np.argwhere(chosen.num_rows != traffic.rows_by_rank)[0].tolist()
                raise ValueError(
                    f"{name} returned lanes with {chosen.num_rows[src, node]} rows of rank {src} for node {node}, "
                    f"which needs {traffic.rows_by_rank[src, node]}"
                )
        return chosen

    return checked


def balance_static(traffic: Traffic) -> Groups:
    """Group ranks of the same local rank, whatever they send, as libraries without a balancer do."""
    return Groups.of_same_local_rank(traffic.topology)


def balance_by_rotation(traffic: Traffic) -> Groups:
    """FUSCO's Algorithm 1: sort each node's ranks by load, rotate node ``i``'s order by ``i``, group by position.

    Loads 9, 1 on node 0 and 8, 2 on node 1: the rotation pairs 9 with 2 and 1 with 8.

    >>> topology = Topology.of_equal_nodes(world_size=4, ranks_per_node=2)
    >>> traffic = Traffic.from_counts(topology, [[0, 9], [0, 1], [8, 0], [2, 0]])
    >>> balance_by_rotation(traffic).group_to_locals, balance_static(traffic).group_to_locals
    (((0, 1), (1, 0)), ((0, 0), (1, 1)))
    """
    by_load = np.argsort(-traffic.rank_loads, axis=1, kind="stable")
    rotated = [np.roll(order, -node) for node, order in enumerate(by_load)]
    return _as_groups(traffic.topology, np.stack(rotated, axis=1))


def balance_send_and_receive(traffic: Traffic) -> Groups:
    """Balance first the rows that groups send, then the rows that their members receive.

    Step 1: take nodes in order of their heaviest rank; assign each node's heaviest rank to the lightest group so far,
    its second heaviest to the second lightest, and so on. Step 2: remove a node and assign it again the same way, which
    is the best response to all other nodes; repeat for every node until nothing improves. Step 3: let two groups swap
    their ranks of one node, as long as that lowers the maximum number of rows that any rank receives without raising
    the largest group load.

    >>> topology = Topology.of_equal_nodes(world_size=6, ranks_per_node=2)
    >>> counts = [[0, 5, 5], [0, 1, 1], [4, 0, 4], [1, 0, 1], [3, 3, 0], [3, 3, 0]]
    >>> traffic = Traffic.from_counts(topology, counts)
    >>> [traffic.group_loads(balance(traffic)).tolist() for balance in (balance_static, balance_send_and_receive)]
    [[24, 10], [18, 16]]
    """
    return _as_groups(traffic.topology, _balance(traffic.num_rows))


def balance_by_lanes(traffic: Traffic) -> Groups | Lanes:
    """Lanes where they pay (``balance_lanes``); else groups, if counterparts would receive more. The CPU's default.

    >>> topology = Topology.of_equal_nodes(world_size=4, ranks_per_node=2)
    >>> balance_by_lanes(Traffic.from_counts(topology, [[0, 30], [0, 20], [21, 0], [29, 0]])).received_rows.tolist()
    [21, 29, 30, 20]
    >>> balance_by_lanes(Traffic.from_counts(topology, [[0, 80], [0, 0], [40, 0], [40, 0]])).num_moved
    40
    """
    lanes = balance_lanes(traffic)
    if traffic.topology.ranks_per_node == 1 or traffic.rank_links is not None or lanes.num_moved:
        return lanes
    groups = balance_send_and_receive(traffic)  # all ranks send what they have in either
    return groups if traffic.received_rows(groups).max() < lanes.received_rows.max() else lanes


# The balancers of fusco by name.
BALANCERS: dict[str, Balancer] = {
    "lanes": balance_by_lanes,
    "static": balance_static,
    "rotation": balance_by_rotation,
    "send-and-receive": balance_send_and_receive,
}
DEFAULT_BALANCERS = {"cpu": "lanes", "cuda": "send-and-receive"}  # lanes on CUDA have not been measured


def is_builtin(balancer: Balancer) -> bool:
    """Return True for balancers of fusco, which return equal lanes for equal traffic on all ranks."""
    return any(balancer is builtin for builtin in BALANCERS.values())


def has_lanes(balancer: Balancer) -> bool:
    """Return True for the balancer by which segments, too, may be sent by other ranks of their node."""
    return balancer is balance_by_lanes


def find_balancer(balancer: Balancer | str) -> Balancer:
    """Return the balancer of this name, or the function that is given; raises for anything else.

    >>> find_balancer("static") is balance_static
    True
    """
    if isinstance(balancer, str):
        if balancer not in BALANCERS:
            raise ValueError(f"balancer {balancer!r} is not one of {', '.join(BALANCERS)}")
        return BALANCERS[balancer]
    if not callable(balancer):
        raise TypeError(
            f"balancer must be a name ({', '.join(BALANCERS)}) or a function of the traffic, got {balancer!r}"
        )
    return balancer


def describe_balancer(balancer: Balancer) -> str:
    """Return the balancer's name, marked if it is user-defined.

    >>> describe_balancer(balance_static), describe_balancer(lambda traffic: balance_static(traffic))
    ('static', '<lambda> (user-defined)')
    """
    name = str(getattr(balancer, "__name__", type(balancer).__name__))
    return next((known for known, each in BALANCERS.items() if each is balancer), f"{name} (user-defined)")


def _as_groups(topology: Topology, group_to_locals: npt.NDArray[Any]) -> Groups:
    return Groups(topology, tuple(map(tuple, group_to_locals.tolist())))


def warm_up_balancers() -> None:
    """Compile the balancers, or load them from the disk cache."""
    traffic = Traffic.from_counts(Topology.of_equal_nodes(4, 2), [[1, 1]] * 4)
    traffic.received_rows(balance_send_and_receive(traffic))
    runs = traffic.lanes_of(balance_by_lanes(traffic)).runs
    runs.offsets_by(runs.carrier)


@compiled()
def _place_node(loads: Any, node: int, group_load: Any, group_to_locals: Any) -> None:
    heaviest_first = np.argsort(-loads[node], kind="mergesort")
    lightest_first = np.argsort(group_load, kind="mergesort")
    for local, group in zip(heaviest_first, lightest_first):  # noqa: B905  numba's zip knows no strict
        group_to_locals[group, node] = local
        group_load[group] += loads[node, local]


@compiled()
def _balance(num_rows: Any) -> Any:
    num_nodes, num_groups, _ = num_rows.shape
    loads = num_rows.sum(axis=2)
    group_load = np.zeros(num_groups, np.int64)
    group_to_locals = np.zeros((num_groups, num_nodes), np.int64)

    # Step 1: nodes with the heaviest rank first, heaviest rank to lightest group.
    heaviest = np.zeros(num_nodes, np.int64)
    for node in range(num_nodes):
        heaviest[node] = loads[node].max()
    order = np.argsort(-heaviest, kind="mergesort")
    for node in order:
        _place_node(loads, node, group_load, group_to_locals)

    # Step 2: best response of each node to all others, until nothing improves.
    for _ in range(_MAX_SWEEPS):
        before = group_load.max()
        for node in order:
            for group in range(num_groups):
                group_load[group] -= loads[node, group_to_locals[group, node]]
            _place_node(loads, node, group_load, group_to_locals)
        if group_load.max() >= before:
            break

    # Step 3: swaps that relieve the rank with the maximum of received rows.
    received = received_by_group(num_rows, group_to_locals)
    while _relieve_worst_receiver(num_rows, loads, group_load, group_to_locals, received):
        pass
    return group_to_locals


@compiled()
def _relieve_worst_receiver(num_rows: Any, loads: Any, group_load: Any, group_to_locals: Any, received: Any) -> bool:
    num_groups, num_nodes = group_to_locals.shape
    load_limit = group_load.max()
    flat = received.argmax()
    worst, dst = flat // num_nodes, flat % num_nodes
    limit = received[worst, dst]
    for other in range(num_groups):
        for src in range(num_nodes):
            if other == worst or src == dst:
                continue
            leaving, joining = group_to_locals[worst, src], group_to_locals[other, src]
            shift = loads[src, joining] - loads[src, leaving]
            if group_load[worst] + shift > load_limit or group_load[other] - shift > load_limit:
                continue
            improves = True
            for node in range(num_nodes):
                change = num_rows[src, joining, node] - num_rows[src, leaving, node]
                if received[worst, node] + change >= limit or received[other, node] - change >= limit:
                    improves = False
                    break
            if improves:
                for node in range(num_nodes):
                    change = num_rows[src, joining, node] - num_rows[src, leaving, node]
                    received[worst, node] += change
                    received[other, node] -= change
                group_load[worst] += shift
                group_load[other] -= shift
                group_to_locals[worst, src], group_to_locals[other, src] = joining, leaving
                return True
    return False
