"""The plan of one rank: both levels of descriptors, and who forwards."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from fusco.core.groups import Groups
from fusco.core.placement import ExpertPlacement
from fusco.core.topology import Topology
from fusco.planner.distribution import ExpertDistribution, NodeRouting, distribute, mark_local_ranks
from fusco.planner.forwarding import NodeForwarding
from fusco.planner.internode import Forwarders
from fusco.planner.sending import SendingStage


@dataclass(frozen=True, kw_only=True)
class DispatchPlan:
    """What one rank does in a dispatch and, mirrored, in the combine that follows.

    ``forwarding`` and ``distribution`` are the two levels of FUSCO section 3.3. Every array is on the device of the
    routing it was made from; the same inputs give the same plan on every device.
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
        """Which ranks share a node."""
        return self.groups.topology

    @property
    def node(self) -> int:
        """The rank's own node."""
        return self.topology.rank_to_node[self.rank]

    @cached_property
    def forwarders(self) -> Forwarders:
        """Who forwards for whom, seen from this rank."""
        return Forwarders(self.rank, self.groups)

    @property
    def src_to_holder(self) -> tuple[int, ...]:
        """See ``Forwarders``."""
        return self.forwarders.src_to_holder

    def sources_held_by(self, rank: int) -> tuple[int, ...]:
        """The sources whose rows stand in the pool of a rank of this node: those it forwards for, then itself."""
        forwarded = self.forwarders.local_to_sources[self.topology.rank_to_local[rank]]
        return (*sorted(forwarded), rank)

    @cached_property
    def row_to_locals(self) -> torch.Tensor:
        """Which local ranks want which rows of the node's routing: bool (num_rows, ranks_per_node)."""
        return mark_local_ranks(self.routing, self.placement, self.topology, self.node)

    @cached_property
    def row_to_first_pair(self) -> torch.Tensor:
        """Int64 (num_rows + 1,): row ``i`` of the node has pairs ``row_to_first_pair[i]`` to ``[i + 1]`` here."""
        rows = torch.arange(self.routing.src_to_first_row[-1] + 1, device=self.distribution.pair_to_row.device)
        return torch.searchsorted(self.distribution.pair_to_row, rows)

    @property
    def num_tokens(self) -> int:
        """Tokens of this rank."""
        return self.num_rows_from(self.rank)

    @property
    def num_topk(self) -> int:
        """Expert slots of a token."""
        return self.routing.topk_idx.shape[1]

    @property
    def num_slots(self) -> int:
        """Rows of the expert-major output."""
        return self.distribution.num_slots

    @property
    def num_rows_per_expert(self) -> torch.Tensor:
        """Rows of each local expert's block, padding not counted, int64 (num_local_experts,)."""
        return self.distribution.num_rows_per_expert

    @cached_property
    def weights(self) -> torch.Tensor | None:
        """The weight of each pair of ``distribution``, as it travelled: float32, or float64 (num_pairs,)."""
        if self.routing.topk_weights is None:
            return None
        return self.routing.topk_weights[self.distribution.pair_to_row, self.distribution.pair_to_k]

    @cached_property
    def slot_weights(self) -> torch.Tensor:
        """The weight of the row in each slot (num_slots,); zero where none stands."""
        weights = self.weights
        assert weights is not None, "there are no weights by slot without weights"
        return weights.new_zeros(self.num_slots).scatter_(0, self.distribution.pair_to_slot, weights)

    @cached_property
    def slot_to_k(self) -> torch.Tensor:
        """Which of its token's experts a slot's row is for, int64 (num_slots,); 0 where none stands."""
        pairs = self.distribution
        return pairs.pair_to_k.new_zeros(self.num_slots).scatter_(0, pairs.pair_to_slot, pairs.pair_to_k)

    def num_rows_from(self, src_rank: int) -> int:
        """How many rows of ``src_rank`` are on this node."""
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
    static_slots: int | None = None,
    sending_stages: tuple[SendingStage, ...] = (),
) -> DispatchPlan:
    """Put a rank's plan together from its forwarding, its node's routing and the groups.

    Args:
        rank: the rank whose plan it is.
        placement: which rank owns which expert.
        groups: who forwards for whom.
        forwarding: what this rank sends to each node.
        routing: the routing of all rows on this rank's node.
        expert_alignment: each expert's block is rounded up to this many rows.
        static_slots: rows of the expert-major output; ``None`` means as many as needed.
        sending_stages: in which order slices leave for other nodes; none means to all in turn.

    """
    distribution = distribute(routing, placement, rank, expert_alignment, static_slots)
    return DispatchPlan(
        rank=rank,
        placement=placement,
        groups=groups,
        forwarding=forwarding,
        routing=routing,
        distribution=distribution,
        sending_stages=sending_stages,
    )
