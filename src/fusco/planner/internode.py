"""Rows between nodes, slice by slice, with their carriers and forwarders: the same on all ranks and any device."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from fusco.planner.rank_lanes import RankLanes


class Piece(NamedTuple):
    """Rows ``first`` to ``end`` of those that ``src`` has for ``node``, in one slice.

    ``place`` is the row of the first among all that ``carrier`` sends: where its sum returns to;
    -1 for a carrier on another node.
    """

    src: int
    node: int
    first: int
    end: int
    carrier: int
    forwarder: int
    place: int

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return self.end - self.first


@dataclass(frozen=True, eq=False)
class InternodeTraffic(RankLanes):
    """Rows between nodes, from the view of one rank; ``num_rows[r][n]`` of rank ``r`` are for another node ``n``.

    A slice has ``rows_per_slice`` of the rows that a carrier sends to a node, one run after the other.
    """

    num_rows: Sequence[Sequence[int]]
    _slices: dict[int, list[list[Piece]]] = field(default_factory=dict)

    def num_rows_on_node(self, num_tokens: Sequence[int]) -> list[int]:
        """Return the rows of each source on this node: all tokens of local ranks, the received ones of others."""
        nodes = self.lanes.topology.rank_to_node
        return [
            num_tokens[src] if nodes[src] == self.node else self.num_rows[src][self.node] for src in range(len(nodes))
        ]

    @property
    def node_ranks(self) -> tuple[int, ...]:
        """The ranks of this node."""
        return self.lanes.topology.node_to_ranks[self.node]

    @property
    def local(self) -> int:
        """Index of this rank in its node."""
        return self.node_ranks.index(self.rank)

    @property
    def destinations(self) -> tuple[int, ...]:
        """All other nodes."""
        return self.lanes.topology.remote_nodes(self.rank)

    @cached_property
    def sources(self) -> tuple[int, ...]:
        """Ranks of other nodes whose rows, or some of them, this rank forwards."""
        return tuple(sorted(set(self.received.src.tolist())))

    @cached_property
    def is_shared(self) -> bool:
        """True if ranks of this node carry rows for each other."""
        return bool((self._outgoing.carrier != self._outgoing.src).any())

    def num_slices(self, rows_per_slice: int) -> int:
        """Return the number of slices of any rank."""
        return -(-self.longest_message // rows_per_slice)

    @cached_property
    def longest_message(self) -> int:
        """Maximum number of rows that any rank sends to another node."""
        runs, topology = self.lanes.runs, self.lanes.topology
        sent = np.zeros((topology.world_size, topology.num_nodes), np.int64)
        np.add.at(sent, (runs.carrier, runs.node), runs.num_rows)
        return int(sent.max())

    def fit(self, rows_per_slice: int, max_held: int) -> int:
        """Return at most ``rows_per_slice``, fewer if a forwarder would get more than ``max_held`` rows in a slice."""
        while rows_per_slice > 1 and np.minimum(self.lanes.rank_to_rank, rows_per_slice).sum(axis=0).max() > max_held:
            rows_per_slice = rows_per_slice * 7 // 8
        return rows_per_slice

    def pieces(self, number: int, rows_per_slice: int) -> list[Piece]:
        """Return what this node sends and receives in a slice, in the order of ``lanes``."""
        if rows_per_slice not in self._slices:
            self._slices[rows_per_slice] = self._cut(rows_per_slice)
        return self._slices[rows_per_slice][number]

    def _cut(self, rows_per_slice: int) -> list[list[Piece]]:
        slices: list[list[Piece]] = [[] for _ in range(self.num_slices(rows_per_slice))]
        all_runs, nodes = self.lanes.runs, np.array(self.lanes.topology.rank_to_node)
        runs = all_runs.select((nodes[all_runs.src] == self.node) | (all_runs.node == self.node))
        num_sent: defaultdict[tuple[int, int], int] = defaultdict(int)
        num_carried: defaultdict[int, int] = defaultdict(int)
        for src, node, begin, end, carrier, forwarder in zip(*(column.tolist() for column in runs), strict=True):
            first, at = begin, num_sent[carrier, node]
            while first < end:
                number = at // rows_per_slice
                size = min(end - first, (number + 1) * rows_per_slice - at)
                place = num_carried[carrier] + first - begin if node != self.node else -1
                slices[number].append(Piece(src, node, first, first + size, carrier, forwarder, place))
                first, at = first + size, at + size
            num_sent[carrier, node] = at
            num_carried[carrier] += end - begin
        return slices

    def sends(self, number: int, rows_per_slice: int) -> list[Piece]:
        """Return what this rank sends in a slice."""
        return [piece for piece in self.pieces(number, rows_per_slice) if piece.carrier == self.rank]

    def receives(self, rank: int, number: int, rows_per_slice: int) -> list[Piece]:
        """Return what a rank of this node receives in a slice; it stores slice by slice, in this order."""
        return [piece for piece in self.pieces(number, rows_per_slice) if piece.forwarder == rank]

    @cached_property
    def num_forwarded(self) -> int:
        """Number of rows that this rank forwards."""
        return int(self.received.num_rows.sum())
