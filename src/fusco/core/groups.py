"""Communication groups: one rank of every node, forwarding for each other."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from fusco.core.topology import Topology


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
