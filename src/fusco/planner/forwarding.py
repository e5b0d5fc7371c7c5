"""Level 1, node-level forwarding: selects the tokens that a rank sends to each node, one copy each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fusco.core.compiled import compiled
from fusco.core.placement import ExpertPlacement
from fusco.core.topology import Topology


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
