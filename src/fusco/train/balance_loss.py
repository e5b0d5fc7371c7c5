"""A loss that is least where a router gives every expert equally many tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def balance_loss(router_logits: Sequence[torch.Tensor], num_topk: int) -> torch.Tensor:
    """Mean over layers of ``num_experts`` times the sum over experts of (share of rows) times (mean probability).

    1 where tokens or probabilities are spread evenly, and ``num_experts / num_topk`` where all tokens choose the same
    experts and are sure of it. The function of that name in transformers takes all layers as one, whose sum may be
    even where no layer is.

    Args:
        router_logits: (num_tokens, num_experts) for each layer.
        num_topk: experts of a token.

    Source: Switch Transformers (arXiv 2101.03961), equations 4 to 6.

    >>> balance_loss([torch.tensor([[9.0, 0, 0, 0], [0, 9.0, 0, 0], [0, 0, 9.0, 0], [0, 0, 0, 9.0]])], 1).item()
    1.0
    >>> round(balance_loss([torch.tensor([[99.0, 0, 0, 0]] * 4)], 1).item(), 4)
    4.0

    """
    losses = []
    for logits in router_logits:
        probabilities = logits.float().softmax(1)
        is_chosen = torch.zeros_like(probabilities).scatter_(1, logits.topk(num_topk, dim=1).indices, 1.0)
        losses.append(logits.shape[1] * (is_chosen.mean(0) / num_topk * probabilities.mean(0)).sum())
    return torch.stack(losses).mean()
