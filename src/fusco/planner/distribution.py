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
    num_dropped_per_expert: torch.Tensor  # int32 (num_local_experts,), rows of each that have no slot
    block_to_first_slot: tuple[int, ...]  # (num_local_experts,)
    block_to_end_slot: tuple[int, ...]  # (num_local_experts,), the end of each block with its padding of zeros
    # slots that all rows need, with padding; with ``rows_per_expert``, rows of the expert with the most
    num_slots_needed: int
    num_slots: int  # rows of the expert-major output; fewer than needed if some pairs were dropped
    rows_per_expert: int | None = None  # slots of each expert, if they have a fixed number

    @property
    def has_padding(self) -> bool:
        """True if some slots inside the blocks are not filled."""
        return len(self.pair_to_slot) < sum(self.block_to_end_slot) - sum(self.block_to_first_slot)

    @cached_property
    def padding_slots(self) -> torch.Tensor:
        """Slots inside the blocks that no pair fills, int64."""
        counts = self.num_rows_per_expert.tolist()
        blocks = zip(self.block_to_first_slot, counts, self.block_to_end_slot, strict=True)
        free = [slot for first, count, end in blocks for slot in range(first + count, end)]
        return torch.tensor(free, dtype=torch.int64, device=self.pair_to_slot.device)
