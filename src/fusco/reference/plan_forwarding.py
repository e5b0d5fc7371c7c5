"""PyTorch twin of the CUDA kernel ``plan_forwarding``: the tokens of a rank that go to each other node."""

from __future__ import annotations

import torch

from fusco.planner.forwarding import DeviceForwarding, mark_destinations


def plan_forwarding(
    topk_idx: torch.Tensor, expert_to_node: torch.Tensor, num_nodes: int, own_node: int
) -> tuple[DeviceForwarding, torch.Tensor]:
    """Plan what a rank sends to each other node.

    Args:
        topk_idx: int (num_tokens, num_topk); an invalid id counts as none.
        expert_to_node: of ``ExpertPlacement.membership_table``, on the same device.
        num_nodes: the number of nodes.
        own_node: this rank's node, to which nothing is sent.

    Returns the plan, and the summary that the kernel writes to host memory.

    Two nodes with two experts each; the rank is on node 0.

    >>> table = torch.tensor([0, 0, 1, 1, -1])
    >>> plan, summary = plan_forwarding(torch.tensor([[0, 1], [3, 0], [-1, 2]]), table, num_nodes=2, own_node=0)
    >>> plan.node_to_tokens[1, :2].tolist(), plan.token_to_place[1].tolist(), summary.tolist()
    ([1, 2], [-1, 0, 1], [0, 2, 6, 0])
    """
    num_tokens, num_experts, device = len(topk_idx), len(expert_to_node) - 1, topk_idx.device
    is_expert = (topk_idx >= 0) & (topk_idx < num_experts)
    marks = mark_destinations(torch.where(is_expert, topk_idx, -1), expert_to_node, num_nodes).T.contiguous()
    marks[own_node] = False
    places = marks.cumsum(1) - 1
    tokens = torch.arange(num_tokens, dtype=torch.int32, device=device).expand(num_nodes, num_tokens)
    node_to_tokens = torch.empty(num_nodes, num_tokens + 1, dtype=torch.int32, device=device)
    node_to_tokens.scatter_(1, torch.where(marks, places, num_tokens), tokens)

    # One extra pair, so that there is a first one.
    is_valid = (is_expert | (topk_idx == -1)).reshape(-1)
    is_invalid = torch.cat([~is_valid, torch.ones(1, dtype=torch.bool, device=device)])
    first = is_invalid.int().argmax()
    bad_id = torch.cat([topk_idx.reshape(-1).long(), torch.zeros(1, dtype=torch.int64, device=device)])[first]
    plan = DeviceForwarding(node_to_tokens=node_to_tokens, token_to_place=torch.where(marks, places, -1).int())
    return plan, torch.cat([marks.sum(1), torch.stack([first, bad_id])])
