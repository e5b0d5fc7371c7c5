"""Level 2, expert-level distribution: maps each row on the node to its slots on one rank."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch


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
    # ``num_local_experts + 1`` entries; the first slot of each block, and the end of the last
    block_to_first_slot: tuple[int, ...]
    num_slots_needed: int  # slots that all rows need, with padding
    num_slots: int  # rows of the expert-major output; fewer than needed if some pairs were dropped

    @property
    def has_padding(self) -> bool:
        """True if some slots inside the blocks are not filled."""
        return len(self.pair_to_slot) < self.block_to_first_slot[-1]

    @cached_property
    def padding_slots(self) -> torch.Tensor:
        """Slots inside the blocks that no pair fills, int64."""
        is_free = torch.ones(self.block_to_first_slot[-1], dtype=torch.bool, device=self.pair_to_slot.device)
        is_free[self.pair_to_slot] = False
        return is_free.nonzero().squeeze(1)
