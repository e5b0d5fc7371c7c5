"""Dispatch plan of one rank: both levels of descriptors, from tokens to nodes and from rows to slots, and the lanes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from fusco.core.compiled import compiled
from fusco.core.lanes import Lanes
from fusco.core.placement import ExpertPlacement
from fusco.core.topology import Topology
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

    @cached_property
    def slot_to_source(self) -> torch.Tensor:
        pairs, first_row = (
            self.distribution,
            torch.tensor(self.routing.src_to_first_row, dtype=torch.int64, device="cpu"),
        )
        src = torch.searchsorted(first_row, pairs.pair_to_row, right=True) - 1
        sources = torch.stack((src, pairs.pair_to_row - first_row[src]), 1)
        return sources.new_zeros(self.num_slots, 2).index_copy_(0, pairs.pair_to_slot, sources)

    def replace_weights(self, of_slots: torch.Tensor) -> None:
        # Where cached properties keep what was made of the former ones.
        vars(self)["weights"] = of_slots[self.distribution.pair_to_slot, self.distribution.pair_to_k]
        vars(self).pop("slot_weights", None)

    def num_rows_from(self, src_rank: int) -> int:
        """Return the number of rows of ``src_rank`` on this node."""
        first = self.routing.src_to_first_row
        return first[src_rank + 1] - first[src_rank]


@dataclass(frozen=True)
class NodeRouting:
    """Routing of all tokens whose rows are on a node, by source rank, tokens ascending."""

    # int (M, K); sources of other nodes contribute only the tokens that they send here
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor | None  # floating, of the same shape, or ``None``
    # ``world_size + 1`` entries; source ``s`` has rows ``src_to_first_row[s]`` to ``src_to_first_row[s + 1]``
    src_to_first_row: tuple[int, ...]


@dataclass(frozen=True)
class ExpertDistribution:
    """Sources of one rank's expert-major rows. Pairs are in order of (row, k)."""

    pair_to_row: torch.Tensor  # int64 (P,), row of the node's routing, ascending
    pair_to_k: torch.Tensor  # int64 (P,), index among the token's experts
    pair_to_slot: torch.Tensor  # int64 (P,), row of the expert-major output
    num_rows_per_expert: torch.Tensor  # int64 (num_local_experts,), rows of each block without padding
    num_dropped_per_expert: torch.Tensor  # int32 (num_local_experts,), rows of each that have no slot
    block_to_first_slot: tuple[int, ...]  # (num_local_experts,)
    block_to_end_slot: tuple[int, ...]  # (num_local_experts,), the end of each block with its padding of zeros
    # slots that all rows need, with padding; with ``rows_per_expert``, rows of the expert with the most
    num_slots_needed: int
    num_slots: int  # rows of the expert-major output; fewer than needed if some pairs were dropped
    rows_per_expert: int | None = None  # slots of each expert, if they have a fixed number

    @property
    def has_padding(self) -> bool:
        """True if some slots inside the blocks are not filled."""
        return len(self.pair_to_slot) < sum(self.block_to_end_slot) - sum(self.block_to_first_slot)

    @cached_property
    def padding_slots(self) -> torch.Tensor:
        """Slots inside the blocks that no pair fills, int64."""
        counts = self.num_rows_per_expert.tolist()
        blocks = zip(self.block_to_first_slot, counts, self.block_to_end_slot, strict=True)
        free = [slot for first, count, end in blocks for slot in range(first + count, end)]
        return torch.tensor(free, dtype=torch.int64, device=self.pair_to_slot.device)


@dataclass(frozen=True)
class NodeForwarding:
    """``node_to_tokens[n]`` (int64, ascending) are the tokens with an expert on node ``n``.

    They are sent to node ``n`` in this order, and are in its forwarder's pool in this order.
    """

    node_to_tokens: tuple[torch.Tensor, ...]

    @property
    def num_tokens_to_node(self) -> tuple[int, ...]:
        """Number of tokens for each node, including this rank's node."""
        return tuple(map(len, self.node_to_tokens))


def select_tokens(topk_idx: torch.Tensor, placement: ExpertPlacement, topology: Topology) -> NodeForwarding:
    """Select the tokens that a rank with this routing sends to each node, one copy each, ascending.

    ``topk_idx`` is int32 or int64 (T, K) on the CPU, -1 for none.

    >>> placement = ExpertPlacement.contiguous(num_experts=4, world_size=2)
    >>> plan = select_tokens(torch.tensor([[0, 1], [3, 0], [-1, 2]]), placement, Topology((0, 1)))
    >>> [tokens.tolist() for tokens in plan.node_to_tokens]
    [[0, 1], [1, 2]]
    """
    expert_to_node = placement.membership_table(topology.rank_to_node, topk_idx.device).numpy()
    tokens, counts = np.empty((topology.num_nodes, len(topk_idx)), np.int64), np.zeros(topology.num_nodes, np.int64)
    _select_tokens(topk_idx.contiguous().numpy(), expert_to_node, tokens, counts)
    selected = torch.from_numpy(tokens)
    return NodeForwarding(tuple(selected[node, :count] for node, count in enumerate(counts.tolist())))


@compiled(nogil=True)
def _select_tokens(topk_idx: Any, expert_to_node: Any, tokens: Any, counts: Any) -> None:
    for token in range(topk_idx.shape[0]):
        for k in range(topk_idx.shape[1]):
            node = expert_to_node[topk_idx[token, k]]  # -1 is the last entry
            if node >= 0 and (counts[node] == 0 or tokens[node, counts[node] - 1] != token):
                tokens[node, counts[node]] = token
                counts[node] += 1


def mark_destinations(topk_idx: torch.Tensor, expert_to_part: torch.Tensor, num_parts: int) -> torch.Tensor:
    """Mark which parts (nodes, or local ranks) need which tokens.

    ``topk_idx`` is (T, K); ``expert_to_part`` a table of ``ExpertPlacement.membership_table``.
    Returns bool (num_tokens, num_parts): the token-node matrix of FUSCO section 3.3.

    >>> expert_to_node = torch.tensor([0, 0, 1, 1, -1])
    >>> mark_destinations(torch.tensor([[0, 1], [3, 0], [-1, -1]]), expert_to_node, 2).int().tolist()
    [[1, 0], [1, 1], [0, 0]]
    """
    parts = expert_to_part[topk_idx.long()]
    marks = torch.zeros(len(topk_idx), num_parts + 1, dtype=torch.bool, device=topk_idx.device)
    marks.scatter_(1, torch.where(parts < 0, num_parts, parts), True)  # noqa: FBT003
    return marks[:, :num_parts]
