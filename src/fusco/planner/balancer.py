"""Balancers: choose communication groups, and so forwarders, from the traffic between nodes.

A balancer is a pure function from ``Traffic``, which all ranks know after an exchange of counts, to ``Groups``. So all
ranks compute the same groups without further communication. Source: FUSCO section 3.4.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fusco.core.compiled import compiled
from fusco.core.groups import Groups
from fusco.core.topology import Topology

IntArray = npt.NDArray[np.int64]

# Sweeps of `balance_send_and_receive` over all nodes; on bimodal loads a fourth one changes nothing measurable.
_MAX_SWEEPS = 3


@dataclass(frozen=True)
class Traffic:
    """``num_rows[n, l, m]`` rows (int64) go from local rank ``l`` of node ``n`` to node ``m``; 0 where ``n == m``."""

    topology: Topology
    num_rows: IntArray

    @classmethod
    def from_counts(cls, topology: Topology, rank_to_counts: Sequence[Sequence[int]]) -> Traffic:
        """Take the rows of rank ``r`` for node ``m`` from ``rank_to_counts[r][m]``; rows for its node are ignored."""
        num_rows = np.array(rank_to_counts, dtype=np.int64)[np.array(topology.node_to_ranks)]
        nodes = np.arange(topology.num_nodes)
        num_rows[nodes, :, nodes] = 0
        return cls(topology, num_rows)

    @property
    def rank_loads(self) -> IntArray:
        """Rows that each rank sends to other nodes, int64 (num_nodes, ranks_per_node)."""
        return self.num_rows.sum(axis=2)

    def group_loads(self, groups: Groups) -> IntArray:
        """Return the rows that the members of each group send in total, int64 (ranks_per_node,)."""
        members = np.array(groups.group_to_locals)
        return self.rank_loads[np.arange(self.topology.num_nodes), members].sum(axis=1)

    def received_rows(self, groups: Groups) -> IntArray:
        """Return the rows that each rank receives as a forwarder, int64 (ranks_per_node groups, num_nodes)."""
        return _received(self.num_rows, np.array(groups.group_to_locals))


# A pure function that chooses who forwards for whom. All ranks call it with the same traffic.
Balancer = Callable[[Traffic], Groups]


def checked_balancer(balancer: Balancer) -> Balancer:
    """Wrap a balancer: ``TypeError`` or ``ValueError`` unless it returns groups of the traffic's ranks."""
    if is_builtin(balancer):
        return balancer

    def checked(traffic: Traffic) -> Groups:
        groups, name = balancer(traffic), getattr(balancer, "__name__", type(balancer).__name__)
        if not isinstance(groups, Groups):
            raise TypeError(f"a balancer must return Groups, got {type(groups).__name__} from {name}")
        if groups.topology != traffic.topology:
            raise ValueError(f"{name} returned groups of {groups.topology} for traffic of {traffic.topology}")
        return groups

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
    """Balance first the rows that groups send, then the rows that their members receive. The default.

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


# The balancers of fusco by name; "send-and-receive" is the default.
BALANCERS: dict[str, Balancer] = {
    "static": balance_static,
    "rotation": balance_by_rotation,
    "send-and-receive": balance_send_and_receive,
}
_BUILTIN = tuple(BALANCERS.values())


def is_builtin(balancer: Balancer) -> bool:
    """Return True for balancers of fusco, which return equal groups for equal traffic on all ranks."""
    return any(balancer is builtin for builtin in _BUILTIN)


def describe_balancer(balancer: Balancer) -> str:
    """Return the balancer's name, marked if it is user-defined.

    >>> describe_balancer(balance_static), describe_balancer(lambda traffic: balance_static(traffic))
    ('balance_static', '<lambda> (user-defined)')
    """
    name = str(getattr(balancer, "__name__", type(balancer).__name__))
    return name if is_builtin(balancer) else f"{name} (user-defined)"


def _as_groups(topology: Topology, group_to_locals: npt.NDArray[Any]) -> Groups:
    return Groups(topology, tuple(map(tuple, group_to_locals.tolist())))


def warm_up_balancers() -> None:
    """Compile the balancers, or load them from the disk cache."""
    traffic = Traffic.from_counts(Topology.of_equal_nodes(4, 2), [[1, 1]] * 4)
    traffic.received_rows(balance_send_and_receive(traffic))


@compiled()
def _received(num_rows: Any, group_to_locals: Any) -> Any:
    num_groups, num_nodes = group_to_locals.shape
    received = np.zeros((num_groups, num_nodes), np.int64)
    for group in range(num_groups):
        for src in range(num_nodes):
            for dst in range(num_nodes):
                received[group, dst] += num_rows[src, group_to_locals[group, src], dst]
    return received


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
    received = _received(num_rows, group_to_locals)
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
