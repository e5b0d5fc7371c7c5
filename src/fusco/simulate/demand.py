"""What must move: rows of a routing by rank and node, before and after duplicates are left out.

Shape symbols as in ``fusco.planner``: R ranks, N nodes, L ranks of a node, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch

from fusco.core.lanes import Groups, IntArray, Lanes
from fusco.core.placement import ExpertPlacement
from fusco.core.topology import Topology
from fusco.planner.balancer import BALANCERS
from fusco.planner.dispatch_plan import mark_destinations
from fusco.planner.traffic import Traffic

_MOST_RANKS = 4096  # of matrices of ranks: 128 MiB each


@dataclass(frozen=True, eq=False, kw_only=True)
class Demand:
    """Rows of one dispatch; combine moves them back.

    Attributes:
        name: of the traffic.
        topology: nodes and ranks.
        bytes_per_row: size of a row.
        num_tokens: int64 (R,), tokens of each rank.
        node_rows: int64 (R, N), tokens of each rank with an expert on each node, its own included.
        rank_copies: mean number of ranks of a node that need a row which the node needs.
        expert_copies: mean number of experts of a node that need a row which the node needs.
        exact_rank_rows: int64 (R, R), tokens of a rank with an expert on each rank; ``None`` if unknown.
        exact_pair_rows: int64 (R, R), (token, expert) pairs of a rank with each rank; ``None`` if unknown.
        expert_rows: int64 (E,), pairs of each expert; empty if unknown.
        expert_to_rank: int64 (E,), the owner of each expert.
        skew: exponent of Zipf's law by which experts were chosen; ``None`` for other traffic.
    """

    name: str
    topology: Topology
    bytes_per_row: int
    num_tokens: IntArray
    node_rows: IntArray
    rank_copies: float
    expert_copies: float
    exact_rank_rows: IntArray | None = None
    exact_pair_rows: IntArray | None = None
    expert_rows: IntArray
    expert_to_rank: IntArray
    skew: float | None = None
    _traffic: dict[tuple[int, ...], Traffic] = field(default_factory=dict, repr=False)
    _chosen: dict[Any, Groups | Lanes] = field(default_factory=dict, repr=False)
    _loads: dict[Any, tuple[IntArray, IntArray]] = field(default_factory=dict, repr=False)

    @classmethod
    def of_routing(
        cls,
        name: str,
        topk_idx: Sequence[torch.Tensor],
        placement: ExpertPlacement,
        topology: Topology,
        bytes_per_row: int,
    ) -> Demand:
        """Count the rows of a routing: ``topk_idx[r]`` are the experts of rank ``r``, integers (num_tokens, num_topk).

        Two nodes of one rank, an expert each; both of rank 0's tokens want expert 1, one also expert 0:

        >>> placement = ExpertPlacement.contiguous(2, 2)
        >>> routing = [torch.tensor([[0, 1], [1, -1]]), torch.zeros((0, 2), dtype=torch.int64)]
        >>> Demand.of_routing("two", routing, placement, Topology((0, 1)), 8).node_rows.tolist()
        [[1, 2], [0, 0]]
        """
        world_size, device = topology.world_size, torch.device("cpu")
        to_rank = placement.membership_table(range(world_size), device)
        to_node = placement.membership_table(topology.rank_to_node, device)
        pairs = np.zeros((world_size, world_size), np.int64)
        ranks, nodes = np.zeros_like(pairs), np.zeros((world_size, topology.num_nodes), np.int64)
        experts = np.zeros(placement.num_experts, np.int64)
        for rank, ids in enumerate(topk_idx):
            chosen = ids[ids >= 0].numpy()
            of_experts = np.bincount(chosen, minlength=placement.num_experts)
            experts += of_experts
            np.add.at(pairs[rank], np.array(placement.expert_to_rank), of_experts)
            ranks[rank] = mark_destinations(ids, to_rank, world_size).sum(dim=0).numpy()
            nodes[rank] = mark_destinations(ids, to_node, topology.num_nodes).sum(dim=0).numpy()
        rows = max(1, int(nodes.sum()))
        return cls(
            name=name,
            topology=topology,
            bytes_per_row=bytes_per_row,
            num_tokens=np.array([len(ids) for ids in topk_idx], np.int64),
            node_rows=nodes,
            rank_copies=int(ranks.sum()) / rows,
            expert_copies=int(pairs.sum()) / rows,
            exact_rank_rows=ranks,
            exact_pair_rows=pairs,
            expert_rows=experts,
            expert_to_rank=np.array(placement.expert_to_rank, np.int64),
        )

    @classmethod
    def of_matrix(cls, name: str, rank_bytes: IntArray, topology: Topology) -> Demand:
        """Take an all-to-all of bytes, int64 (R, R): rows of one byte without duplicates."""
        node_rows = rank_bytes @ np.eye(topology.num_nodes, dtype=np.int64)[np.array(topology.rank_to_node)]
        nothing = np.zeros(0, np.int64)
        return cls(
            name=name,
            topology=topology,
            bytes_per_row=1,
            num_tokens=rank_bytes.sum(axis=1),
            node_rows=node_rows,
            rank_copies=1.0,
            expert_copies=1.0,
            exact_rank_rows=rank_bytes,
            exact_pair_rows=rank_bytes,
            expert_rows=nothing,
            expert_to_rank=nothing,
        )

    @cached_property
    def traffic(self) -> Traffic:
        """Rows between nodes, as balancers take them."""
        return self.traffic_with(())

    def traffic_with(self, nic_shares: tuple[int, ...]) -> Traffic:
        """Return the rows between nodes for ranks whose NICs have these relative speeds."""
        if nic_shares not in self._traffic:
            links = [nic_shares] * self.topology.num_nodes if nic_shares and len(set(nic_shares)) > 1 else None
            self._traffic[nic_shares] = Traffic.from_counts(self.topology, self.node_rows, links)  # type: ignore[arg-type]
        return self._traffic[nic_shares]

    def chosen_by(self, balancer: str, nic_shares: tuple[int, ...]) -> Groups | Lanes:
        """Return what a balancer of fusco chooses for these rows, by name; it is asked once."""
        if (key := (balancer, nic_shares)) not in self._chosen:
            self._chosen[key] = BALANCERS[balancer](self.traffic_with(nic_shares))
        return self._chosen[key]

    def loads_by(self, balancer: str, nic_shares: tuple[int, ...]) -> tuple[IntArray, IntArray]:
        """Return the rows between nodes that each rank sends and receives, int64 (R,) each, with this balancer."""
        if (key := (balancer, nic_shares)) not in self._loads:
            self._loads[key] = self.traffic_with(nic_shares).loads_of(self.chosen_by(balancer, nic_shares))
        return self._loads[key]

    @cached_property
    def rank_rows(self) -> IntArray:
        """Distinct rows from rank to rank, int64 (R, R); spread evenly over the ranks of a node if unknown."""
        return self._by_rank(self.rank_copies) if self.exact_rank_rows is None else self.exact_rank_rows

    @cached_property
    def pair_rows(self) -> IntArray:
        """(token, expert) pairs from rank to rank, int64 (R, R); spread evenly over a node's ranks if unknown."""
        return self._by_rank(self.expert_copies) if self.exact_pair_rows is None else self.exact_pair_rows

    @property
    def has_matrix(self) -> bool:
        """True if rows from rank to rank are known, or few enough to be spread."""
        return self.exact_pair_rows is not None or self.topology.world_size <= _MOST_RANKS

    def _by_rank(self, copies: float) -> IntArray:
        if not self.has_matrix:
            raise ValueError(f"a matrix of {self.topology.world_size} ranks is too large, at most {_MOST_RANKS} are")
        share = copies / self.topology.ranks_per_node
        spread = np.rint(self.node_rows * share).astype(np.int64)
        return spread[:, np.array(self.topology.rank_to_node)]

    @property
    def remote_rows(self) -> int:
        """Rows between nodes with one copy for each token and node: the least that must cross."""
        return int(self.traffic.num_rows.sum())

    @property
    def remote_pairs(self) -> int:
        """Rows between nodes with one copy for each token and expert."""
        if self.exact_pair_rows is None:
            return round(self.remote_rows * self.expert_copies)
        nodes = np.array(self.topology.rank_to_node)
        return int(self.exact_pair_rows[nodes[:, None] != nodes].sum())

    def node_bytes(self, *, has_duplicates: bool) -> IntArray:
        """Return bytes from node to node, int64 (N, N), with a copy for each expert or for each node."""
        of_ranks = np.zeros((self.topology.num_nodes, self.topology.num_nodes), np.int64)
        nodes = np.array(self.topology.rank_to_node)
        if has_duplicates and self.exact_pair_rows is not None:
            np.add.at(of_ranks, (nodes[:, None], nodes), self.exact_pair_rows)
            return of_ranks * self.bytes_per_row
        np.add.at(of_ranks, nodes, self.node_rows)
        scale = self.expert_copies if has_duplicates else 1.0
        return np.rint(of_ranks * scale).astype(np.int64) * self.bytes_per_row
