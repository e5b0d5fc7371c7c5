"""Load-balancing loss: smallest if a router sends equally many tokens to every expert."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def balance_loss(router_logits: Sequence[torch.Tensor], num_topk: int) -> torch.Tensor:
    """Return the mean over layers of ``num_experts`` times the sum over experts of (row share) * (mean probability).

    ``router_logits`` are (num_tokens, num_experts) for each layer. The loss is 1 if tokens or probabilities are spread
    evenly, and ``num_experts / num_topk`` if all tokens choose the same experts with probability 1. The corresponding
    function in transformers treats all layers as one; their sum may be even although no layer is.

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
