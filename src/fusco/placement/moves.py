"""The plan of a move: which rank sends which expert to which, so that an expert crosses to a node once.

Shapes: E experts, R ranks, P places on each rank, N nodes, M transfers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from fusco.core.balance import BatchPlan
from fusco.core.compiled import compiled
from fusco.core.integers import check_integer
from fusco.core.lanes import IntArray
from fusco.core.placement import ExpertPlacement
from fusco.core.topology import Topology

_NUM_STEPS, _LEAST_STEP_BYTES, _MOST_STEP_BYTES = 8, 8 << 20, 64 << 20  # of a move as fast as possible
_GRANULE = 512  # bytes at whose multiples flows are cut: pages and GPUs copy aligned memory faster


class _HasPlaces(Protocol):
    @property
    def physical_to_logical(self) -> Any: ...


Placement: TypeAlias = ExpertPlacement | _HasPlaces | Sequence[Sequence[int]] | IntArray


@dataclass(frozen=True, eq=False)
class MovePlan:
    """Transfers of experts between ranks: ``experts[i]`` goes from ``src_ranks[i]`` to ``dst_ranks[i]``.

    Attributes:
        experts, src_ranks, dst_ranks: int64 (M,); transfers between nodes come first, then those within.
        parents: int64 (M,), the transfer that brings the expert to the sender; -1 if the sender has it already.
        bytes_per_expert: bytes of the weights of one expert.
        topology: which ranks share a node.
    """

    experts: IntArray
    src_ranks: IntArray
    dst_ranks: IntArray
    parents: IntArray
    bytes_per_expert: int
    topology: Topology

    @cached_property
    def crosses(self) -> npt.NDArray[np.bool_]:
        """True for the transfers between nodes, bool (M,)."""
        nodes = np.array(self.topology.rank_to_node)
        return np.asarray(nodes[self.src_ranks] != nodes[self.dst_ranks])

    @cached_property
    def node_bytes(self) -> IntArray:
        """Bytes from node (row) to node (column), int64 (N, N), zero on the diagonal."""
        nodes, found = np.array(self.topology.rank_to_node), np.zeros((self.topology.num_nodes,) * 2, np.int64)
        src, dst = nodes[self.src_ranks[self.crosses]], nodes[self.dst_ranks[self.crosses]]
        np.add.at(found, (src, dst), self.bytes_per_expert)
        return found

    @cached_property
    def bound_bytes(self) -> int:
        """Bytes of the busiest NIC, the more of sent and received, if ranks of a node share its bytes evenly."""
        busiest = max(self.node_bytes.sum(axis=axis).max() for axis in (0, 1))
        return -(-int(busiest) // self.topology.ranks_per_node)


def as_places(placement: Placement, name: str = "placement") -> IntArray:
    """Return the expert in each place, int64 (R, P), -1 for none.

    Args:
        placement: such an array or nested sequence; or what has one as ``physical_to_logical``, such as a
            ``PlannedPlacement``; or an ``ExpertPlacement``, whose experts are in order on each rank.
        name: what errors call it.

    Raises:
        TypeError, ValueError: for anything else, with the value.

    >>> as_places(ExpertPlacement.explicit([1, 0, 1], world_size=2)).tolist()
    [[1, -1], [0, 2]]
    """
    given: Any = getattr(placement, "physical_to_logical", None)
    if given is None and isinstance(placement, ExpertPlacement):
        most = max(map(len, placement.rank_to_experts))
        given = [[*experts, *[-1] * (most - len(experts))] for experts in placement.rank_to_experts]
    places = np.asarray(placement if given is None else given)
    if places.ndim != 2 or not np.issubdtype(places.dtype, np.integer):
        raise TypeError(f"{name} must have an integer for each place of each rank, got {placement!r}")
    if places.min(initial=0) < -1:
        raise ValueError(f"{name} has expert {places.min()}; -1 is an empty place")
    return places.astype(np.int64)


def plan_moves(old: Placement, new: Placement, bytes_per_expert: int = 1, topology: Topology | None = None) -> MovePlan:
    """Plan which rank gives which expert to which, from one placement to another.

    A rank that has an expert already, in any place, gets none. An expert crosses to a node once, and only if no rank
    there has it; the rank that receives it passes it on to others of its node. Step 1: the node that gives each expert
    that crosses, so that the busiest node sends as little as possible (exact, by augmenting paths). Step 2: ranks; of
    those that could give or receive, the one with the least so far.

    Args:
        old: the expert in each place, -1 for none, integers (R, P) or as ``as_places`` takes them.
        new: the same after the move; the number of places may differ.
        bytes_per_expert: bytes of the weights of one expert.
        topology: which ranks share a node; by default all.

    Raises:
        TypeError, ValueError: for other placements; if the two have different numbers of ranks, which are not those of
            the topology; or if no rank has an expert that the new placement has.

    Two nodes of two ranks. Expert 0 crosses from rank 0 to rank 2, which passes it on to rank 3:

    >>> plan = plan_moves([[0], [1], [2], [3]], [[0], [1], [0], [0]], 10, Topology.of_equal_nodes(4, 2))
    >>> list(zip(plan.experts.tolist(), plan.src_ranks.tolist(), plan.dst_ranks.tolist(), plan.parents.tolist()))
    [(0, 0, 2, -1), (0, 2, 3, 0)]
    >>> plan.node_bytes.tolist(), plan.bound_bytes
    ([[0, 10], [0, 0]], 5)
    """
    held, wanted = as_places(old, "old"), as_places(new, "new")
    check_integer("bytes_per_expert", bytes_per_expert, least=0)
    topology = topology or Topology.of_equal_nodes(max(len(held), 1), max(len(held), 1))
    if not len(held) == len(wanted) == topology.world_size:
        raise ValueError(f"old has {len(held)} ranks, new has {len(wanted)}, the topology has {topology.world_size}")
    num_experts = int(max(held.max(initial=-1), wanted.max(initial=-1))) + 1
    has, wants = _table(held, num_experts), _table(wanted, num_experts)
    if lost := np.flatnonzero(wants.any(axis=1) & ~has.any(axis=1)).tolist():
        raise ValueError(f"new has expert(s) {lost}, which are on no rank in old")
    nodes = np.array(topology.rank_to_node)
    member = (nodes[:, None] == np.arange(topology.num_nodes)).astype(np.int64)
    needs = wants & ~has
    on_node = has @ member > 0
    crossings = np.argwhere((needs @ member > 0) & ~on_node)
    sources = np.full(len(crossings), -1)
    _spread(crossings, on_node, sources)
    table = np.empty((int(needs.sum()), 4), np.int64)
    _choose_ranks(crossings, sources, has, needs, nodes, table)
    experts, src_ranks, dst_ranks, parents = np.ascontiguousarray(table.T)
    return MovePlan(experts, src_ranks, dst_ranks, parents, bytes_per_expert, topology)


def places_of_copies(plan: BatchPlan, num_ranks: int, places_per_rank: int) -> IntArray:
    """Return the copies of a batch as a placement, int64 (R, P): each rank's in the order of the plan, then -1.

    Raises ``ValueError`` if a rank has more copies than places.

    >>> copies = BatchPlan(*np.array([[4, 5, 6], [1, 0, 1], [9, 9, 9]]), loads=None, loads_before=None, limit="",
    ...     rows_per_expert=None)
    >>> places_of_copies(copies, num_ranks=2, places_per_rank=2).tolist()
    [[5, -1], [4, 6]]
    """
    num_copies = np.bincount(plan.ranks, minlength=num_ranks)
    if (most := int(num_copies.max(initial=0))) > places_per_rank:
        raise ValueError(f"rank {num_copies.argmax()} has {most} copies, but {places_per_rank} spare places")
    if len(num_copies) > num_ranks:
        raise ValueError(f"the plan copies to rank {len(num_copies) - 1}, but there are {num_ranks} ranks")
    places, order = np.full((num_ranks, places_per_rank), -1), np.argsort(plan.ranks, kind="stable")
    first = np.cumsum(num_copies) - num_copies
    places[plan.ranks[order], np.arange(len(order)) - first[plan.ranks[order]]] = plan.experts[order]
    return places


def _table(places: IntArray, num_experts: int) -> npt.NDArray[np.bool_]:
    """Return which rank has which expert, bool (E, R)."""
    table = np.zeros((num_experts, len(places)), dtype=np.bool_)
    ranks, columns = np.nonzero(places >= 0)
    table[places[ranks, columns], ranks] = True
    return table


@compiled()
def _spread(crossings: Any, on_node: Any, sources: Any) -> None:
    """Set the node that gives each expert that crosses; the busiest gives as few as possible."""
    num_sent = np.zeros(on_node.shape[1], np.int64)
    for i in range(len(crossings)):
        for node in range(len(num_sent)):
            is_less = sources[i] < 0 or num_sent[node] < num_sent[sources[i]]
            if on_node[crossings[i, 0], node] and is_less:
                sources[i] = node
        num_sent[sources[i]] += 1
    while len(crossings) and _relieve(crossings, on_node, sources, num_sent):
        pass


@compiled()
def _relieve(crossings: Any, on_node: Any, sources: Any, num_sent: Any) -> bool:
    """Take one expert from the busiest node, along a path of nodes; return False if no path ends lower."""
    busiest = num_sent.argmax()
    reached_by, queue = np.full(len(num_sent), -1), np.empty(len(num_sent), np.int64)
    queue[0], begin, end = busiest, 0, 1
    while begin < end:
        giver = queue[begin]
        begin += 1
        for i in range(len(crossings)):
            if sources[i] != giver:
                continue
            for node in range(len(num_sent)):
                if node == busiest or reached_by[node] >= 0 or not on_node[crossings[i, 0], node]:
                    continue
                reached_by[node] = i
                if num_sent[node] < num_sent[busiest] - 1:
                    num_sent[node] += 1
                    _shift(reached_by, busiest, node, sources)
                    num_sent[busiest] -= 1
                    return True
                queue[end] = node
                end += 1
    return False


@compiled()
def _shift(reached_by: Any, first: int, last: int, sources: Any) -> None:
    """Let each node of a path give what the node before it gave."""
    taker = last
    while taker != first:
        crossing = reached_by[taker]
        giver = sources[crossing]
        sources[crossing] = taker
        taker = giver


@compiled()
def _choose_ranks(crossings: Any, sources: Any, has: Any, needs: Any, nodes: Any, table: Any) -> None:
    """Fill the table (M, 4) of expert, source, destination, parent: first what crosses, then what stays on a node."""
    num_experts, num_ranks = has.shape
    num_sent, num_received, num_given = np.zeros(num_ranks), np.zeros(num_ranks), np.zeros(num_ranks)
    brought = np.full((num_experts, nodes.max() + 1), -1)
    for i in range(len(crossings)):
        expert, node = crossings[i]
        src = _least(has[expert], nodes, sources[i], num_sent)
        dst = _least(needs[expert], nodes, node, num_received)
        num_sent[src] += 1
        num_received[dst] += 1
        table[i, 0], table[i, 1], table[i, 2], table[i, 3] = expert, src, dst, -1
        brought[expert, node] = i
    num = len(crossings)
    for expert in range(num_experts):
        for dst in range(num_ranks):
            parent = brought[expert, nodes[dst]]
            if not needs[expert, dst] or (parent >= 0 and table[parent, 2] == dst):
                continue
            src = table[parent, 2] if parent >= 0 else _least(has[expert], nodes, nodes[dst], num_given)
            num_given[src] += 1
            table[num, 0], table[num, 1], table[num, 2], table[num, 3] = expert, src, dst, parent
            num += 1


@compiled()
def _least(can: Any, nodes: Any, node: int, loads: Any) -> int:
    """Return the least loaded rank of a node, of those that can."""
    best = -1
    for rank in range(len(loads)):
        if can[rank] and nodes[rank] == node and (best < 0 or loads[rank] < loads[best]):
            best = rank
    return best


class MoveSteps:
    """A plan in steps: in each, every flow of one rank to another advances by the same share of its bytes.

    So the busiest NIC is the same in all steps, and their bounds add up to the bound of the plan. A flow is the
    transfers between two ranks, one after the other. What a rank passes on leaves it one step after its arrival.

    Args:
        plan: the plan.
        ends: int64, ascending, in proportion to the bytes that have moved after each step. Up to rounding, as flows are
            cut at multiples of 512 bytes. See ``even_steps`` and ``fast_steps``.

    Rank 0 gives rank 2 two experts of 1024 bytes in two steps, and rank 2 passes the first on to rank 3:

    >>> from fusco.core.topology import Topology
    >>> from fusco.placement.moves import plan_moves
    >>> old, new = [[0, 1], [-1, -1], [-1, -1], [-1, -1]], [[0, 1], [-1, -1], [0, 1], [0, -1]]
    >>> plan = plan_moves(old, new, 1024, Topology.of_equal_nodes(4, 2))
    >>> steps = MoveSteps(plan, even_steps(plan, 512))
    >>> steps.num_steps, [np.subtract(*steps.pieces(step)[::-1]).tolist() for step in range(3)]
    (3, [[1024, 0, 0], [0, 1024, 1024], [0, 0, 0]])
    """

    def __init__(self, plan: MovePlan, ends: IntArray) -> None:
        self.plan = plan
        is_passed_on, index = plan.parents >= 0, np.arange(len(plan.experts))
        flows, flow = np.unique(plan.src_ranks * plan.topology.world_size + plan.dst_ranks, return_inverse=True)
        flow = np.where(is_passed_on, len(flows), flow.reshape(-1))
        order = np.argsort(flow, kind="stable")
        num_transfers = np.bincount(flow, minlength=len(flows) + 1)
        position = np.empty_like(order)
        position[order] = index - np.repeat(np.cumsum(num_transfers) - num_transfers, num_transfers)
        shares = np.append(0, ends)[:, None] / max(ends[-1:].max(initial=0), 1)
        of_flow = np.ceil(shares * num_transfers * plan.bytes_per_expert / _GRANULE).astype(np.int64) * _GRANULE
        root = np.where(is_passed_on, plan.parents, index)  # a transfer that is passed on is cut as its parent is
        most = plan.bytes_per_expert
        moved = np.clip(of_flow[:, flow[root]] - position[root] * most, 0, most)
        moved = moved[np.append(True, (moved[1:] > moved[:-1]).any(axis=1))]
        if is_passed_on.any():
            moved = np.concatenate((moved, moved[-1:]))
            moved[1:, is_passed_on] = moved[:-1, is_passed_on]
        self._moved, self.num_steps = moved, len(moved) - 1  # int64 (num_steps + 1, M): bytes before each step

    def pieces(self, step: int) -> tuple[IntArray, IntArray]:
        """Return where the bytes that each transfer moves in a step begin and end in its expert, int64 (M,) each."""
        return self._moved[step], self._moved[step + 1]


def even_steps(plan: MovePlan, step_bytes: int) -> IntArray:
    """Return the ``ends`` of equal steps: a NIC, or a rank within its node, moves at most ``step_bytes`` in each."""
    check_integer("step_bytes", step_bytes, least=1)
    return np.arange(1, -(-max(plan.bound_bytes, _most_within(plan)) // step_bytes) + 1)


def fast_steps(plan: MovePlan) -> IntArray:
    """Return the ``ends`` of steps of a move that a caller waits for.

    While the bytes of a step cross, those of the step before are passed on within nodes, and put into their places. So
    the last step is a third of the others: little is left to the end. The bytes of NICs say how many steps there are; a
    rank's bytes within its node, which take less time, only where they would take too much memory at once.

    >>> from fusco.core.topology import Topology
    >>> from fusco.placement.moves import plan_moves
    >>> plans = [plan_moves([[0], [1]], [[1], [0]], size << 20, Topology((0, 1))) for size in (20, 80)]
    >>> [fast_steps(plan).tolist() for plan in plans]
    [[3, 6, 7], [3, 6, 9, 12, 15, 18, 21, 22]]
    """
    of_nic, within = plan.bound_bytes, _most_within(plan)
    step_bytes = min(max(of_nic // _NUM_STEPS, _LEAST_STEP_BYTES), _MOST_STEP_BYTES)
    ends = 3 * np.arange(1, max(-(-of_nic // step_bytes), -(-within // _MOST_STEP_BYTES), 1) + 1)
    ends[-1] -= 2
    return ends


def _most_within(plan: MovePlan) -> int:
    """Return the most bytes that a rank sends or receives within its node."""
    within = ~plan.crosses
    most = max(np.bincount(ranks[within]).max(initial=0) for ranks in (plan.src_ranks, plan.dst_ranks))
    return int(most) * plan.bytes_per_expert
