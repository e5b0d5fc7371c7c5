"""Level 1, node-level forwarding: selects the tokens that a rank sends to each node, one copy each."""

from __future__ import annotations

from dataclasses import dataclass

import torch


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
