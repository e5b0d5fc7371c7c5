"""Rows between nodes, slice by slice, and their forwarders: the same on all ranks and any device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from fusco.core.groups import Groups


class SliceBounds(NamedTuple):
    """Rows ``first`` to ``end`` of a slice, among those that one rank sends to one node."""

    first: int
    end: int


class Send(NamedTuple):
    """Rows ``first`` to ``end`` of those that this rank sends to ``node``, where ``forwarder`` receives them."""

    node: int
    forwarder: int
    first: int
    end: int


class Receive(NamedTuple):
    """Rows ``first`` to ``end`` of those that ``src`` sends to this rank's node."""

    src: int
    first: int
    end: int


class Destination(NamedTuple):
    """Another node, and the rank there that forwards what this rank sends."""

    node: int
    forwarder: int


@dataclass(frozen=True)
class Forwarders:
    """Forwarders of all ranks, from the view of one rank."""

    rank: int  # this rank
    groups: Groups  # the communication groups

    @property
    def node(self) -> int:
        """The rank's node."""
        return self.groups.topology.rank_to_node[self.rank]

    @cached_property
    def destinations(self) -> tuple[Destination, ...]:
        """All other nodes with their forwarders, the next node first, so that nodes do not all send to the same one."""
        num_nodes = self.groups.topology.num_nodes
        nodes = [(self.node + step) % num_nodes for step in range(1, num_nodes)]
        return tuple(Destination(node, self.groups.forwarder(self.rank, node)) for node in nodes)

    @cached_property
    def local_to_sources(self) -> tuple[tuple[int, ...], ...]:
        """For each rank of the node, the ranks of other nodes whose rows it forwards, by ascending node."""
        topology = self.groups.topology
        found: list[list[int]] = [[] for _ in range(topology.ranks_per_node)]
        for node in topology.remote_nodes(self.rank):
            for src in topology.node_to_ranks[node]:
                found[topology.rank_to_local[self.groups.forwarder(src, self.node)]].append(src)
        return tuple(map(tuple, found))

    @property
    def sources(self) -> tuple[int, ...]:
        """Ranks of other nodes whose rows this rank forwards."""
        return self.local_to_sources[self.groups.topology.rank_to_local[self.rank]]

    @cached_property
    def src_to_holder(self) -> tuple[int, ...]:
        """For each source rank, the rank of this node in whose pool its rows are: itself, or its forwarder."""
        holders = list(range(self.groups.topology.world_size))
        for holder, sources in zip(self.groups.topology.node_to_ranks[self.node], self.local_to_sources, strict=True):
            for src in sources:
                holders[src] = holder
        return tuple(holders)


@dataclass(frozen=True)
class InternodeTraffic(Forwarders):
    """Rows between nodes: sources, destinations and numbers."""

    # ``num_rows[r][n]`` tokens of rank ``r`` have experts on node ``n``, if ``n`` is not the node of ``r``
    num_rows: Sequence[Sequence[int]]

    def num_rows_on_node(self, num_tokens: Sequence[int]) -> list[int]:
        """Return the rows of each source on this node: all tokens of local ranks, the received ones of others."""
        nodes = self.groups.topology.rank_to_node
        return [
            num_tokens[src] if nodes[src] == self.node else self.num_rows[src][self.node] for src in range(len(nodes))
        ]

    def num_slices(self, rows_per_slice: int) -> int:
        """Return the number of slices of the longest message of any rank."""
        return -(-self.longest_message // rows_per_slice)

    @cached_property
    def longest_message(self) -> int:
        """Maximum number of rows that any rank sends to another node."""
        nodes = self.groups.topology.rank_to_node
        num_sent = [n for src, of in enumerate(self.num_rows) for node, n in enumerate(of) if node != nodes[src]]
        return max(num_sent, default=0)

    def slice_bounds(self, src: int, node: int, number: int, rows_per_slice: int) -> SliceBounds:
        """Return the bounds of a slice, among the rows that ``src`` sends to ``node``."""
        num_rows = self.num_rows[src][node]
        return SliceBounds(min(num_rows, number * rows_per_slice), min(num_rows, (number + 1) * rows_per_slice))

    def sends(self, number: int, rows_per_slice: int) -> list[Send]:
        """Return what this rank sends in a slice."""
        return [
            Send(*destination, *self.slice_bounds(self.rank, destination.node, number, rows_per_slice))
            for destination in self.destinations
        ]

    def receives(self, number: int, rows_per_slice: int) -> Iterator[Receive]:
        """Yield what this rank receives in a slice; nothing from sources without more rows."""
        for src in self.sources:
            bounds = self.slice_bounds(src, self.node, number, rows_per_slice)
            if bounds.first < bounds.end:
                yield Receive(src, *bounds)

    def first_in_pool(self, local: int, number: int, rows_per_slice: int) -> int:
        """Return the first row of a slice among the rows that a local rank forwards; they are stored slice by slice."""
        sources = self.local_to_sources[local]
        return sum(self.slice_bounds(src, self.node, number, rows_per_slice).first for src in sources)

    @cached_property
    def num_forwarded(self) -> tuple[int, ...]:
        """Number of rows that each rank of this node forwards."""
        return tuple(sum(self.num_rows[src][self.node] for src in sources) for sources in self.local_to_sources)
