"""Lanes: which rank of a node sends which rows to another node, and which rank there receives them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fusco.core.compiled import compiled
from fusco.core.topology import Topology

IntArray = npt.NDArray[np.int64]


class Runs(NamedTuple):
    """Runs of rows, an entry each: rows ``first`` to ``end`` of those that rank ``src`` has for node ``node``.

    ``carrier`` is the rank of the source's node that sends them, ``forwarder`` the rank of the other that receives
    them. All are int64 (num_runs,).
    """

    src: IntArray
    node: IntArray
    first: IntArray
    end: IntArray
    carrier: IntArray
    forwarder: IntArray

    @property
    def num_rows(self) -> IntArray:
        """Rows of each run."""
        return self.end - self.first

    def select(self, index: npt.NDArray[np.bool_] | IntArray) -> Runs:
        """Return some of the runs, by mask or by index."""
        index = index.nonzero()[0] if index.dtype == np.bool_ else index
        return Runs(*(column.take(index) for column in self))

    def offsets_by(self, rank: IntArray) -> IntArray:
        """Return the rows of earlier runs with the same entry in ``rank``: places in the memory of that rank.

        >>> runs = Runs(*np.array([[0, 1, 0, 5, 0, 2], [0, 1, 5, 7, 0, 3], [1, 1, 0, 4, 1, 3]]).T)
        >>> runs.offsets_by(runs.carrier).tolist(), runs.offsets_by(runs.forwarder).tolist()
        ([0, 5, 0], [0, 0, 2])
        """
        return sums_before(self.num_rows, rank)


def sums_before(values: IntArray, key: IntArray) -> IntArray:
    """Return for each entry the sum of the earlier values with the same key, which is not negative.

    >>> sums_before(np.array([5, 2, 4]), np.array([0, 1, 0])).tolist()
    [0, 0, 5]
    """
    return _sums_before(np.ascontiguousarray(values), np.ascontiguousarray(key))


@compiled(nogil=True)
def _sums_before(values: Any, key: Any) -> Any:
    before = np.empty(len(values), np.int64)
    sums = np.zeros(key.max() + 1 if len(key) else 0, np.int64)
    for i in range(len(values)):
        before[i] = sums[key[i]]
        sums[key[i]] += values[i]
    return before


@dataclass(frozen=True, eq=False)
class Lanes:
    """Routes of rows between nodes: ``runs`` has every row that a rank has for another node, once.

    A rank sends its runs for a node in their order here, and a rank receives them in this order from each other. They
    are in order of carrier, then node, the carrier's rows before those that it carries for others, then source and row.
    A ``Groups`` is the special case in which each rank carries its rows, in one run for each node.

    >>> topology = Topology.of_equal_nodes(world_size=4, ranks_per_node=2)
    >>> groups = Groups(topology, ((0, 1), (1, 0)))
    >>> lanes = Lanes.of_groups(groups, [[0, 3], [0, 5], [2, 0], [0, 0]])
    >>> [column.tolist() for column in lanes.runs[:1] + lanes.runs[3:]]
    [[0, 1, 2], [3, 5, 2], [0, 1, 2], [3, 2, 1]]
    """

    topology: Topology
    runs: Runs

    @classmethod
    def of_runs(cls, topology: Topology, runs: Sequence[tuple[int, int, int, int, int, int]]) -> Lanes:
        """Make lanes of runs in any order, each with the fields of ``Runs``; empty runs are left out.

        Raises ``ValueError`` unless carriers are on the source's node, forwarders on the other, and the runs of a
        source for a node continue one another from row 0 on.
        """
        table = np.array(runs, np.int64).reshape(-1, len(Runs._fields))
        of = Runs(*table[table[:, 2] != table[:, 3]].T)
        nodes = np.array(topology.rank_to_node)
        for what, rank, on_node in (("carrier", of.carrier, nodes[of.src]), ("forwarder", of.forwarder, of.node)):
            if (wrong := np.flatnonzero(nodes[rank] != on_node)).size:
                i = wrong[0]
                raise ValueError(f"{what} {rank[i]} of a run of rank {of.src[i]} is not on node {on_node[i]}")
        of = of.select(np.lexsort((of.first, of.node, of.src)))
        is_next = (of.src[1:] == of.src[:-1]) & (of.node[1:] == of.node[:-1])
        expected = np.append(np.zeros(min(1, len(of.first)), np.int64), np.where(is_next, of.end[:-1], 0))
        if (wrong := np.flatnonzero((of.first != expected) | (of.end <= of.first) | (nodes[of.src] == of.node))).size:
            src, node, first, end = (int(column[wrong[0]]) for column in of[:4])
            raise ValueError(f"rows {first} to {end} of rank {src} for node {node} do not follow its rows before them")
        return cls(topology, of.select(np.lexsort((of.src, of.carrier != of.src, of.node, of.carrier))))

    @classmethod
    def of_groups(cls, groups: Groups, num_rows: Sequence[Sequence[int]] | IntArray) -> Lanes:
        """Return the lanes of communication groups; ``num_rows[r][n]`` rows of rank ``r`` are for node ``n``."""
        topology = groups.topology
        nodes = np.array(topology.rank_to_node)
        counts = np.where(nodes[:, None] != np.arange(topology.num_nodes), num_rows, 0)
        src, node = np.nonzero(counts)
        local = np.array(groups.group_to_locals)[np.array(groups.rank_to_group)[src], node]
        forwarder = np.array(topology.node_to_ranks)[node, local]
        return cls(topology, Runs(src, node, np.zeros_like(src), counts[src, node], src, forwarder))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Lanes):
            return NotImplemented
        return self.topology == other.topology and all(map(np.array_equal, self.runs, other.runs))

    __hash__ = None  # type: ignore[assignment]  # as for other values with arrays

    @cached_property
    def num_rows(self) -> IntArray:
        """Rows from each rank to each node, int64 (world_size, num_nodes)."""
        counts = np.zeros((self.topology.world_size, self.topology.num_nodes), np.int64)
        np.add.at(counts, (self.runs.src, self.runs.node), self.runs.num_rows)
        return counts

    @cached_property
    def rank_to_rank(self) -> IntArray:
        """Rows from each carrier to each forwarder, int64 (world_size, world_size)."""
        counts = np.zeros((self.topology.world_size, self.topology.world_size), np.int64)
        np.add.at(counts, (self.runs.carrier, self.runs.forwarder), self.runs.num_rows)
        return counts

    @cached_property
    def num_moved(self) -> int:
        """Rows that another rank than their source sends."""
        runs = self.runs
        return int(runs.num_rows[runs.carrier != runs.src].sum())

    @cached_property
    def sent_rows(self) -> IntArray:
        """Rows that each rank sends to other nodes, int64 (world_size,)."""
        return self._rows_by(self.runs.carrier)

    @cached_property
    def received_rows(self) -> IntArray:
        """Rows that each rank receives from other nodes, int64 (world_size,)."""
        return self._rows_by(self.runs.forwarder)

    @cached_property
    def most_rows(self) -> int:
        """Rows that the busiest rank sends to other nodes, or receives from them."""
        return int(max(self.sent_rows.max(), self.received_rows.max()))

    def _rows_by(self, rank: IntArray) -> IntArray:
        counts = np.zeros(self.topology.world_size, np.int64)
        np.add.at(counts, rank, self.runs.num_rows)
        return counts


@dataclass(frozen=True)
class Groups:
    """Members of each group: ``group_to_locals[g][n]`` is the local rank of node ``n`` in group ``g``.

    Raises ``ValueError`` unless every rank of a node is in exactly one group.

    >>> topology = Topology.of_equal_nodes(world_size=4, ranks_per_node=2)
    >>> groups = Groups(topology, ((0, 1), (1, 0)))
    >>> groups.forwarder(src_rank=0, dst_node=1), groups.forwarder(src_rank=1, dst_node=1)
    (3, 2)
    """

    topology: Topology
    group_to_locals: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        every_local = list(range(self.topology.ranks_per_node))
        for node in range(self.topology.num_nodes):
            if sorted(members[node] for members in self.group_to_locals) != every_local:
                raise ValueError(f"groups {self.group_to_locals} do not take each rank of node {node} exactly once")

    @classmethod
    def of_same_local_rank(cls, topology: Topology) -> Groups:
        """Return the static grouping: ranks with the same local rank."""
        return cls(topology, tuple((local,) * topology.num_nodes for local in range(topology.ranks_per_node)))

    @cached_property
    def rank_to_group(self) -> tuple[int, ...]:
        """The group of each rank."""
        group_of = [0] * self.topology.world_size
        for group, members in enumerate(self.group_to_locals):
            for node, local in enumerate(members):
                group_of[self.topology.node_to_ranks[node][local]] = group
        return tuple(group_of)

    def forwarder(self, src_rank: int, dst_node: int) -> int:
        """Return the rank of ``dst_node`` that receives the rows of ``src_rank`` for this node."""
        local = self.group_to_locals[self.rank_to_group[src_rank]][dst_node]
        return self.topology.node_to_ranks[dst_node][local]
