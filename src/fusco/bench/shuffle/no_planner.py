"""fusco without its planner (FUSCO section 5.4): each rank that needs a token is sent a separate copy."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fusco.core.placement import ExpertPlacement
from fusco.planner.forwarding import mark_destinations
from fusco.planner.routing import Routing


@dataclass(frozen=True)
class Expanded:
    """A routing in which each (token, rank that needs it) is a separate token, with that rank's experts only."""

    routing: Routing  # of the copies
    copy_to_token: torch.Tensor  # int64 (num_copies,), ascending; by rank among the copies of a token


def expand(routing: Routing, placement: ExpertPlacement) -> Expanded:
    """Make a token of each (token, rank); rows arrive in the same order, since each expert still gets a token once.

    >>> placement = ExpertPlacement.contiguous(num_experts=4, world_size=2)
    >>> expanded = expand(Routing(torch.tensor([[0, 3], [-1, -1], [2, 3]])), placement)
    >>> expanded.copy_to_token.tolist(), expanded.routing.topk_idx.tolist()
    ([0, 0, 2], [[0, -1], [-1, 3], [2, 3]])
    """
    ids = routing.topk_idx
    expert_to_rank = placement.membership_table(range(placement.world_size), ids.device)
    tokens, ranks = mark_destinations(ids, expert_to_rank, placement.world_size).nonzero(as_tuple=True)
    is_there = expert_to_rank[ids[tokens].long()] == ranks[:, None]
    weights = None if routing.topk_weights is None else routing.topk_weights[tokens]
    return Expanded(Routing(torch.where(is_there, ids[tokens], -1), weights), tokens)


def sum_copies(parts: torch.Tensor, copy_to_token: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Return token-major rows: the sums of each token's copies, added in float32."""
    wide = torch.promote_types(parts.dtype, torch.float32)
    out = torch.zeros(num_tokens, *parts.shape[1:], dtype=wide, device=parts.device)
    return out.index_add_(0, copy_to_token, parts.to(wide)).to(parts.dtype)
