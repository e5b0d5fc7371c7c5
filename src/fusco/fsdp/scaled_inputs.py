"""Blocks whose router scales the rows of experts, and not their results, as those of Llama 4."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True, eq=False)
class ScaledInputs:
    """Replaces the ``forward`` of a block with ``router``, ``experts``, ``shared_expert`` and ``top_k``.

    transformers gives every expert all tokens, multiplied by zero where the router has not chosen it. Here a token is a
    row for each expert that it has chosen, so that a rank dispatches ``top_k`` rows per token, with one expert each.
    """

    block: Any

    def __call__(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sum of all experts, (num_tokens, hidden), and the router's logits, as the original block does."""
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        scores, logits = self.block.router(x)
        chosen, expert_idx = scores.topk(self.block.top_k, dim=1)
        rows = (x[:, None] * chosen[..., None]).flatten(0, 1)
        routed = self.block.experts(rows, expert_idx.reshape(-1, 1), torch.ones_like(rows[:, :1]))
        return self.block.shared_expert(x) + routed.unflatten(0, chosen.shape).sum(1), logits


def scaling_block(name: str, experts: nn.Module, model: nn.Module) -> nn.Module | None:
    """Return the block around a module of experts, by name in its model, if its parts are those of ``ScaledInputs``."""
    parent_name, _, key = name.rpartition(".")
    parent = model.get_submodule(parent_name) if key == "experts" else model
    is_block = {key for key, _ in parent.named_children()} == {"experts", "router", "shared_expert"}
    return parent if is_block and hasattr(parent, "top_k") and parent.experts is experts else None
