"""Which rows cross between nodes: on the device by token; on the host by rank, node and slice."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from fusco.core.groups import Groups
from fusco.cuda.device_plan import DevicePlan
from fusco.cuda.kernels.held_rows import HeldRows
from fusco.planner.forwarding import DeviceForwarding


@dataclass(frozen=True)
class Crossing:
    """Who sends how many rows where, and who forwards them: the same on all ranks.

    Attributes:
        rank: whose view it is.
        groups: who forwards for whom.
        num_rows: ``num_rows[r][n]`` tokens of rank ``r`` concern node ``n``, another one than its own.

    """

    rank: int
    groups: Groups
    num_rows: tuple[tuple[int, ...], ...]

    @property
    def node(self) -> int:
        """The own node."""
        return self.groups.topology.rank_to_node[self.rank]

    @cached_property
    def destinations(self) -> tuple[tuple[int, int], ...]:
        """Every other node and its forwarder, the next node first, so that not all send to the same one at first."""
        num_nodes = self.groups.topology.num_nodes
        nodes = [(self.node + step) % num_nodes for step in range(1, num_nodes)]
        return tuple((node, self.groups.forwarder(self.rank, node)) for node in nodes)

    @cached_property
    def local_to_sources(self) -> tuple[tuple[int, ...], ...]:
        """For each rank of the own node, the ranks of other nodes whose rows it forwards, by ascending node."""
        topology = self.groups.topology
        found: list[list[int]] = [[] for _ in range(topology.ranks_per_node)]
        for node in topology.remote_nodes(self.rank):
            for src in topology.node_to_ranks[node]:
                found[topology.rank_to_local[self.groups.forwarder(src, self.node)]].append(src)
        return tuple(map(tuple, found))

    @property
    def sources(self) -> tuple[int, ...]:
        """Those that this rank forwards."""
        return self.local_to_sources[self.groups.topology.rank_to_local[self.rank]]

    def num_rows_on_node(self, num_tokens: Sequence[int]) -> list[int]:
        """Rows of every source on the own node: all tokens of its own ranks, of others what concerns it."""
        nodes = self.groups.topology.rank_to_node
        return [
            num_tokens[src] if nodes[src] == self.node else self.num_rows[src][self.node] for src in range(len(nodes))
        ]

    def num_slices(self, rows_per_slice: int) -> int:
        """How many slices the longest message of any rank has."""
        return -(-self.longest_message // rows_per_slice)

    @cached_property
    def longest_message(self) -> int:
        """Most rows that any rank sends to another node."""
        nodes = self.groups.topology.rank_to_node
        crossing = [n for src, of in enumerate(self.num_rows) for node, n in enumerate(of) if node != nodes[src]]
        return max(crossing, default=0)

    def cut(self, src: int, node: int, number: int, rows_per_slice: int) -> tuple[int, int]:
        """The first and the end of a slice's rows, among those that ``src`` sends to ``node``."""
        num_rows = self.num_rows[src][node]
        return min(num_rows, number * rows_per_slice), min(num_rows, (number + 1) * rows_per_slice)

    def going(self, number: int, rows_per_slice: int) -> list[tuple[int, int, int, int]]:
        """What this rank sends in a slice: node, forwarder, first and end among the rows for that node."""
        return [
            (remote, forwarder, *self.cut(self.rank, remote, number, rows_per_slice))
            for remote, forwarder in self.destinations
        ]

    def coming(self, number: int, rows_per_slice: int) -> Iterator[tuple[int, int, int]]:
        """What it receives: source, first and end among that source's rows for this node."""
        for src in self.sources:
            first, end = self.cut(src, self.node, number, rows_per_slice)
            if first < end:
                yield src, first, end

    def first_in_pool(self, local: int, number: int, rows_per_slice: int) -> int:
        """Where a slice begins among the rows that a rank of the own node forwards: they stand slice by slice."""
        return sum(self.cut(src, self.node, number, rows_per_slice)[0] for src in self.local_to_sources[local])

    @cached_property
    def num_forwarded(self) -> tuple[int, ...]:
        """Rows that each rank of the own node forwards."""
        return tuple(sum(self.num_rows[src][self.node] for src in sources) for sources in self.local_to_sources)


@dataclass(frozen=True, kw_only=True)
class InternodePlan(DevicePlan):
    """A plan between nodes.

    Attributes:
        crossing: who sends how much where.
        forwarding: which tokens this rank sends.

    """

    crossing: Crossing
    forwarding: DeviceForwarding
    _slices: dict[int, list[HeldRows]] = field(default_factory=dict)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All that it holds on the device, what was copied together for earlier calls included."""
        own_rows = vars(self).get("own_rows")
        copied = [own_rows] if own_rows else []
        copied += itertools.chain.from_iterable(self._slices.values())
        copies = [tensor for held in copied for tensor in held.tensors]
        return [*super().tensors, self.forwarding.node_to_tokens, self.forwarding.token_to_place, *copies]

    @cached_property
    def own_rows(self) -> HeldRows:
        """The tokens of this node's ranks."""
        topology = self.crossing.groups.topology
        runs = [[(rank, 0, self.num_rows_of(rank))] for rank in topology.node_to_ranks[self.crossing.node]]
        return self.rows_of(runs, topology.rank_to_local[self.rank])

    def slices(self, rows_per_slice: int) -> list[HeldRows]:
        """The rows of other nodes' ranks, slice by slice."""
        if rows_per_slice not in self._slices:
            crossing = self.crossing
            self._slices[rows_per_slice] = [
                self.rows_of(
                    [
                        [(src, *crossing.cut(src, crossing.node, number, rows_per_slice)) for src in sources]
                        for sources in crossing.local_to_sources
                    ],
                    crossing.groups.topology.rank_to_local[self.rank],
                )
                for number in range(crossing.num_slices(rows_per_slice))
            ]
        return self._slices[rows_per_slice]
