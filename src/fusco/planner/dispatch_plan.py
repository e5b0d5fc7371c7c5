"""Dispatch plan of one rank: both levels of descriptors, and the forwarders."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from fusco.core.groups import Groups
from fusco.core.placement import ExpertPlacement
from fusco.core.topology import Topology
from fusco.planner.distribution import ExpertDistribution, NodeRouting, distribute
from fusco.planner.forwarding import NodeForwarding
from fusco.planner.internode import Forwarders
from fusco.planner.sending import SendingStage


@dataclass(frozen=True, kw_only=True)
class DispatchPlan:
    """Plan of one rank for a dispatch and, mirrored, for the combine that follows.

    ``forwarding`` and ``distribution`` are the two levels of FUSCO section 3.3. Every array is on the device of the
    routing. The same inputs give the same plan on every device.
    """

    rank: int
    placement: ExpertPlacement
    groups: Groups
    forwarding: NodeForwarding
    routing: NodeRouting
    distribution: ExpertDistribution
    sending_stages: tuple[SendingStage, ...] = ()

    @property
    def topology(self) -> Topology:
        """Nodes of the ranks."""
        return self.groups.topology

    @property
    def node(self) -> int:
        """This rank's node."""
        return self.topology.rank_to_node[self.rank]

    @cached_property
    def forwarders(self) -> Forwarders:
        """Forwarders, from the view of this rank."""
        return Forwarders(self.rank, self.groups)

    @property
    def src_to_holder(self) -> tuple[int, ...]:
        return self.forwarders.src_to_holder

    def sources_held_by(self, rank: int) -> tuple[int, ...]:
        """Return the sources whose rows are in the pool of a local rank: those that it forwards for, then itself.

        The source on the next node is first: combine returns rows in this order, so nodes do not all send to one.
        """
        forwarded = self.forwarders.local_to_sources[self.topology.rank_to_local[rank]]
        nodes, num_nodes = self.topology.rank_to_node, self.topology.num_nodes
        return (*sorted(forwarded, key=lambda src: (nodes[src] - self.node) % num_nodes), rank)

    @property
    def num_tokens(self) -> int:
        """Number of tokens of this rank."""
        return self.num_rows_from(self.rank)

    @property
    def num_topk(self) -> int:
        """Experts per token (top-k)."""
        return self.routing.topk_idx.shape[1]

    @property
    def num_slots(self) -> int:
        """Number of rows of the expert-major output."""
        return self.distribution.num_slots

    @property
    def num_rows_per_expert(self) -> torch.Tensor:
        """Rows of each local expert's block without padding, int64 (num_local_experts,)."""
        return self.distribution.num_rows_per_expert

    @property
    def num_rows_per_expert_on_host(self) -> torch.Tensor:
        return self.num_rows_per_expert.cpu()

    @property
    def num_rows_needed(self) -> torch.Tensor:
        needed = self.distribution.num_slots_needed
        return torch.tensor([needed], dtype=torch.int32, device=self.num_rows_per_expert.device)

    @cached_property
    def weights(self) -> torch.Tensor | None:
        """Weight of each pair of ``distribution``, in the dtype of the routing: float32 or float64 (num_pairs,)."""
        if self.routing.topk_weights is None:
            return None
        return self.routing.topk_weights[self.distribution.pair_to_row, self.distribution.pair_to_k]

    @cached_property
    def slot_weights(self) -> torch.Tensor:
        """Weight of the row in each slot (num_slots,); zero in empty slots."""
        weights = self.weights
        assert weights is not None, "weights by slot need weights"
        return weights.new_zeros(self.num_slots).scatter_(0, self.distribution.pair_to_slot, weights)

    @cached_property
    def slot_to_k(self) -> torch.Tensor:
        """Index k of each slot's row among the experts of its token, int64 (num_slots,); 0 in empty slots."""
        pairs = self.distribution
        return pairs.pair_to_k.new_zeros(self.num_slots).scatter_(0, pairs.pair_to_slot, pairs.pair_to_k)

    def num_rows_from(self, src_rank: int) -> int:
        """Return the number of rows of ``src_rank`` on this node."""
        first = self.routing.src_to_first_row
        return first[src_rank + 1] - first[src_rank]


def make_plan(
    *,
    rank: int,
    placement: ExpertPlacement,
    groups: Groups,
    forwarding: NodeForwarding,
    routing: NodeRouting,
    expert_alignment: int = 1,
    static_rows: int | None = None,
    sending_stages: tuple[SendingStage, ...] = (),
) -> DispatchPlan:
    """Make a rank's plan from its forwarding, its node's routing and the groups.

    Args:
        rank: this rank.
        placement: owners of the experts.
        groups: communication groups, which determine the forwarders.
        forwarding: tokens that this rank sends to each node.
        routing: the routing of all rows on this rank's node.
        expert_alignment: each expert's block is rounded up to this many rows.
        static_rows: rows of the expert-major output; ``None`` means as many as needed.
        sending_stages: order in which slices are sent to other nodes; empty means to all nodes in turn.
    """
    distribution = distribute(routing, placement, rank, expert_alignment, static_rows)
    return DispatchPlan(
        rank=rank,
        placement=placement,
        groups=groups,
        forwarding=forwarding,
        routing=routing,
        distribution=distribution,
        sending_stages=sending_stages,
    )
