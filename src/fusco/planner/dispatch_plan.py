"""Dispatch plan of one rank: both levels of descriptors, and the lanes between nodes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from fusco.core.lanes import Lanes
from fusco.core.placement import ExpertPlacement
from fusco.core.topology import Topology
from fusco.planner.distribution import ExpertDistribution, NodeRouting
from fusco.planner.forwarding import NodeForwarding
from fusco.planner.rank_lanes import RankLanes
from fusco.planner.sending import SendingStage


@dataclass(frozen=True, kw_only=True)
class DispatchPlan:
    """Plan of one rank for a dispatch and, mirrored, for the combine that follows.

    ``forwarding`` and ``distribution`` are the two levels of FUSCO section 3.3. Every array is on the device of the
    routing. The same inputs give the same plan on every device. See ``fusco.engine.base.Plan`` for what verbs use.
    """

    rank: int
    placement: ExpertPlacement
    rank_lanes: RankLanes  # lanes, from the view of this rank
    forwarding: NodeForwarding
    routing: NodeRouting
    distribution: ExpertDistribution
    sending_stages: tuple[SendingStage, ...] = ()

    @property
    def lanes(self) -> Lanes:
        """Lanes between nodes."""
        return self.rank_lanes.lanes

    @property
    def topology(self) -> Topology:
        """Nodes of the ranks."""
        return self.lanes.topology

    @property
    def node(self) -> int:
        """This rank's node."""
        return self.topology.rank_to_node[self.rank]

    @property
    def num_tokens(self) -> int:
        return self.num_rows_from(self.rank)

    @property
    def num_topk(self) -> int:
        return self.routing.topk_idx.shape[1]

    @property
    def num_slots(self) -> int:
        return self.distribution.num_slots

    @property
    def rows_per_expert(self) -> int | None:
        return self.distribution.rows_per_expert

    @property
    def num_rows_per_expert(self) -> torch.Tensor:
        return self.distribution.num_rows_per_expert

    @property
    def num_dropped_per_expert(self) -> torch.Tensor:
        return self.distribution.num_dropped_per_expert

    @property
    def num_rows_per_expert_on_host(self) -> torch.Tensor:
        return self.num_rows_per_expert.cpu()

    @property
    def num_rows_needed(self) -> torch.Tensor:
        needed = self.distribution.num_slots_needed
        return torch.tensor([needed], dtype=torch.int32, device=self.num_rows_per_expert.device)

    @cached_property
    def weights(self) -> torch.Tensor | None:
        """Weight of each pair of ``distribution``, in the dtype of the routing: float32 or float64 (P,)."""
        if self.routing.topk_weights is None:
            return None
        return self.routing.topk_weights[self.distribution.pair_to_row, self.distribution.pair_to_k]

    @cached_property
    def slot_weights(self) -> torch.Tensor:
        weights = self.weights
        assert weights is not None, "weights by slot need weights"
        return weights.new_zeros(self.num_slots).scatter_(0, self.distribution.pair_to_slot, weights)

    @cached_property
    def slot_to_k(self) -> torch.Tensor:
        pairs = self.distribution
        return pairs.pair_to_k.new_zeros(self.num_slots).scatter_(0, pairs.pair_to_slot, pairs.pair_to_k)

    def num_rows_from(self, src_rank: int) -> int:
        """Return the number of rows of ``src_rank`` on this node."""
        first = self.routing.src_to_first_row
        return first[src_rank + 1] - first[src_rank]
