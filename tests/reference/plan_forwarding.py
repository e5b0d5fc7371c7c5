"""PyTorch twin of the CUDA kernel ``plan_forwarding``: the tokens of a rank that go to each other node."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from fusco.planner.dispatch_plan import mark_destinations
from fusco.planner.routing import Routing

_LARGEST_ID = 2**31 - 1


@dataclass(frozen=True)
class DeviceForwarding:
    """Tokens that one rank sends to each other node, as ``NodeForwarding``, with sizes that only the device knows."""

    # int32 (N, T + 1): the tokens for each node, ascending; entries after them are undefined
    node_to_tokens: torch.Tensor
    # int32 (N, T): position of a token among those for a node; -1 for none
    token_to_place: torch.Tensor


class PlannedForwarding(NamedTuple):
    """Everything that the kernel writes."""

    plan: DeviceForwarding  # tokens and places
    # int64 (num_nodes + 2,): tokens for each node; the first pair whose id is not an expert, or the number of pairs;
    # and that id, or 0
    summary: torch.Tensor
    # for each other node, ascending, the routing of its tokens: ids of its experts, -1 for others
    messages: list[Routing]


def plan_forwarding(
    routing: Routing,
    expert_to_node: torch.Tensor,
    num_nodes: int,
    own_node: int,
    max_rows: int | None = None,
    *,
    sends_invalid_ids: bool = False,
) -> PlannedForwarding:
    """Plan what a rank sends to each other node.

    Args:
        routing: an invalid id counts as none.
        expert_to_node: of ``ExpertPlacement.membership_table``, on the same device.
        num_nodes: the number of nodes.
        own_node: this rank's node, to which nothing is sent.
        max_rows: rows of every message: tokens beyond them are left out, and rows without tokens have no ids and zero
            weights. ``None`` means messages of all tokens, and no more.
        sends_invalid_ids: if there is an invalid id, all messages have a row for each token, with invalid ids only, as
            far as int32 can have them. ``max_rows`` must be the number of tokens.

    Two nodes with two experts each; the rank is on node 0.

    >>> table = torch.tensor([0, 0, 1, 1, -1])
    >>> made = plan_forwarding(Routing(torch.tensor([[0, 1], [3, 0], [-1, 2]])), table, num_nodes=2, own_node=0)
    >>> made.plan.node_to_tokens[1, :2].tolist(), made.plan.token_to_place[1].tolist(), made.summary.tolist()
    ([1, 2], [-1, 0, 1], [0, 2, 6, 0])
    >>> made.messages[0].topk_idx.tolist()
    [[3, -1], [-1, 2]]
    """
    topk_idx = routing.topk_idx
    num_tokens, num_experts, device = len(topk_idx), len(expert_to_node) - 1, topk_idx.device
    is_expert = (topk_idx >= 0) & (topk_idx < num_experts)
    experts = torch.where(is_expert, topk_idx, -1)
    marks = mark_destinations(experts, expert_to_node, num_nodes).T.contiguous()
    marks[own_node] = False
    counts = marks.sum(1)
    if max_rows is not None:
        marks &= marks.cumsum(1) <= max_rows
    places = marks.cumsum(1) - 1
    tokens = torch.arange(num_tokens, dtype=torch.int32, device=device).expand(num_nodes, num_tokens)
    node_to_tokens = torch.full((num_nodes, num_tokens + 1), -1, dtype=torch.int32, device=device)
    node_to_tokens.scatter_(1, torch.where(marks, places, num_tokens), tokens)

    # One extra pair, so that there is a first one.
    is_valid = (is_expert | (topk_idx == -1)).reshape(-1)
    is_invalid = torch.cat([~is_valid, torch.ones(1, dtype=torch.bool, device=device)])
    first = is_invalid.int().argmax()
    bad_id = torch.cat([topk_idx.reshape(-1).long(), torch.zeros(1, dtype=torch.int64, device=device)])[first]
    plan = DeviceForwarding(node_to_tokens=node_to_tokens, token_to_place=torch.where(marks, places, -1).int())
    rejected = None
    if sends_invalid_ids and not is_valid.all():
        assert max_rows == num_tokens, (max_rows, num_tokens)
        rejected = torch.where(is_expert, -1, topk_idx).clamp(-_LARGEST_ID, _LARGEST_ID).int()
    messages = []
    for node in (node for node in range(num_nodes) if node != own_node):
        of_node = torch.where(expert_to_node[experts.long()] == node, experts, -1).int()
        message = _message(of_node[marks[node]], routing.topk_weights, marks[node], max_rows)
        messages.append(message if rejected is None else Routing(rejected, message.topk_weights))
    return PlannedForwarding(plan, torch.cat([counts, torch.stack([first, bad_id])]), messages)


def _message(ids: torch.Tensor, weights: torch.Tensor | None, is_sent: torch.Tensor, max_rows: int | None) -> Routing:
    """Return the routing of the tokens that go to a node, with empty rows up to ``max_rows``."""
    num_empty = 0 if max_rows is None else max_rows - len(ids)
    if weights is not None:
        weights = torch.cat([weights[is_sent], weights.new_zeros(num_empty, weights.shape[1])])
    return Routing(torch.cat([ids, ids.new_full((num_empty, ids.shape[1]), -1)]), weights)
