"""Select the tokens of a rank that each node needs, in one pass."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from fusco.core.compiled import compiled
from fusco.core.placement import ExpertPlacement
from fusco.core.topology import Topology
from fusco.planner.forwarding import NodeForwarding


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
