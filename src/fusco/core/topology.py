"""Topology of a group: nodes, whose ranks access each other's memory directly (NVLink or shared memory)."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

# Links of each rank to other nodes, by node and local rank.
RankLinks = tuple[tuple[int, ...], ...]
ScheduleMode = Literal["exact", "few", "spread-out"]  # how the stages of an all-to-all between nodes are made


@dataclass(frozen=True)
class Topology:
    """The nodes of a group of ranks, all with the same number of ranks.

    ``rank_to_node[r]`` is the node of rank ``r``; nodes are numbered by their lowest rank. Local ranks within a node
    are 0, 1, ... in order of rank. Nodes of unequal size raise a ``ValueError`` that lists them, as a communication
    group takes one rank of every node.

    After ``Communicator.shrink`` a topology is that of the ranks that are left, the *members*, which it numbers from 0;
    ``numbers[r]`` is the number of rank ``r`` in the group.

    >>> topology = Topology.of_equal_nodes(world_size=4, ranks_per_node=2)
    >>> topology.node_to_ranks
    ((0, 1), (2, 3))
    >>> Topology.from_hosts(["a", "b", "a", "b"]).rank_to_node
    (0, 1, 0, 1)
    """

    rank_to_node: tuple[int, ...]
    members: tuple[int, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        if not self.rank_to_node:
            raise ValueError("a topology needs at least one rank, got none")
        in_order = list(dict.fromkeys(self.rank_to_node))
        if in_order != list(range(len(in_order))):
            raise ValueError(f"nodes must be numbered by their lowest rank, got rank_to_node={self.rank_to_node}")
        sizes = {node: len(ranks) for node, ranks in enumerate(self.node_to_ranks)}
        if len(set(sizes.values())) > 1:
            listing = ", ".join(f"node {node} has {size}" for node, size in sizes.items())
            raise ValueError(
                f"nodes must have equally many ranks, as a communication group takes one rank of every node: {listing}"
            )

    @classmethod
    def of_equal_nodes(cls, world_size: int, ranks_per_node: int) -> Topology:
        """Make nodes of ``ranks_per_node`` consecutive ranks; ``ValueError`` if that does not divide ``world_size``."""
        if ranks_per_node < 1 or world_size < 1 or world_size % ranks_per_node:
            raise ValueError(f"ranks_per_node={ranks_per_node} does not divide a group of {world_size} ranks")
        return cls(tuple(rank // ranks_per_node for rank in range(world_size)))

    @classmethod
    def from_hosts(cls, hosts: Sequence[str], ranks_per_node: int | None = None) -> Topology:
        """Make one node for each host name in ``hosts[rank]``.

        With ``ranks_per_node``, nodes are that many consecutive ranks each, so that one host can play several nodes. A
        node that would span two hosts raises ``ValueError``, as its ranks could not share memory.
        """
        if ranks_per_node is None:
            names = {host: node for node, host in enumerate(dict.fromkeys(hosts))}
            return cls(tuple(names[host] for host in hosts))
        topology = cls.of_equal_nodes(len(hosts), ranks_per_node)
        for node, ranks in enumerate(topology.node_to_ranks):
            if len({hosts[rank] for rank in ranks}) > 1:
                where = ", ".join(f"rank {rank} on {hosts[rank]}" for rank in ranks)
                raise ValueError(f"ranks_per_node={ranks_per_node} puts different hosts into node {node}: {where}")
        return topology

    @classmethod
    def of_members(cls, members: Sequence[int], nodes: Sequence[Hashable]) -> Topology:
        """Make the topology of the ranks ``members``, ascending, of which member ``i`` is on node ``nodes[i]``.

        If nodes have different numbers of members, they are divided into smaller nodes of equally many: as many as
        divide all of these numbers.

        >>> Topology.of_members([0, 1, 2, 3, 4, 7], ["a", "a", "a", "a", "b", "b"]).rank_to_node
        (0, 0, 1, 1, 2, 2)
        """
        sizes: dict[Hashable, int] = {}
        positions = []
        for node in nodes:
            positions.append(sizes.get(node, 0))
            sizes[node] = positions[-1] + 1
        ranks_per_node = math.gcd(*sizes.values())
        parts = [(node, position // ranks_per_node) for node, position in zip(nodes, positions, strict=True)]
        numbers = {part: number for number, part in enumerate(dict.fromkeys(parts))}
        return cls(tuple(numbers[part] for part in parts), tuple(members))

    @cached_property
    def numbers(self) -> tuple[int, ...]:
        """The number of each rank in the group."""
        return self.members or tuple(range(len(self.rank_to_node)))

    @cached_property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.rank_to_node)

    @cached_property
    def node_to_ranks(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each node, ascending: ``node_to_ranks[node][local_rank]``."""
        nodes: list[list[int]] = [[] for _ in range(max(self.rank_to_node) + 1)]
        for rank, node in enumerate(self.rank_to_node):
            nodes[node].append(rank)
        return tuple(map(tuple, nodes))

    @cached_property
    def rank_to_local(self) -> tuple[int, ...]:
        """The local rank of each rank within its node."""
        return tuple(self.node_to_ranks[node].index(rank) for rank, node in enumerate(self.rank_to_node))

    @cached_property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return len(self.node_to_ranks)

    @cached_property
    def ranks_per_node(self) -> int:
        """Number of ranks of each node."""
        return len(self.node_to_ranks[0])

    def locals_of(self, node: int) -> tuple[int, ...]:
        """Return the local rank of each rank of ``node``, -1 for all other ranks."""
        places = zip(self.rank_to_node, self.rank_to_local, strict=True)
        return tuple(local if of_rank == node else -1 for of_rank, local in places)

    def remote_nodes(self, rank: int) -> tuple[int, ...]:
        """Return all nodes other than that of ``rank``, ascending."""
        return tuple(node for node in range(self.num_nodes) if node != self.rank_to_node[rank])
