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


def assign_slots(
    local_expert: torch.Tensor, num_local_experts: int, expert_alignment: int = 1, static_rows: int | None = None
) -> ExpertDistribution:
    """Assign slots by a stable counting sort by expert, as the kernels ``plan`` and ``plan_pairs`` do, for their tests.

    Blocks are in order of local expert, each rounded up to ``expert_alignment`` rows. Rows inside a block are in order
    of (source rank, token, k). With ``static_rows`` the output has that many rows, and pairs beyond them are dropped.
    ``local_expert``, int (M, K), is the index among this rank's experts; -1 for none or a remote one.

    >>> assign_slots(torch.tensor([[1, 0], [1, -1]]), num_local_experts=2).pair_to_slot.tolist()
    [1, 0, 2]
    """
    device = local_expert.device
    pair_to_row, pair_to_k = (local_expert >= 0).nonzero(as_tuple=True)
    pair_to_expert = local_expert[pair_to_row, pair_to_k]

    # Step 1: number of rows of each expert, and the first slot of its block.
    num_rows = torch.bincount(pair_to_expert, minlength=num_local_experts)
    block_rows = (num_rows + expert_alignment - 1) // expert_alignment * expert_alignment
    block_to_first_slot = (0, *block_rows.cumsum(0).tolist())

    # Step 2: a stable sort by expert keeps (source rank, token, k) order inside a block.
    by_expert = torch.argsort(pair_to_expert, stable=True)
    first_pair = num_rows.cumsum(0) - num_rows
    first_slot = torch.tensor(block_to_first_slot[:-1], dtype=torch.int64, device=device)
    position = torch.arange(len(by_expert), device=device)
    sorted_expert = pair_to_expert[by_expert]
    pair_to_slot = torch.empty_like(pair_to_row)
    pair_to_slot[by_expert] = position - first_pair[sorted_expert] + first_slot[sorted_expert]

    # Step 3: drop what does not fit.
    needed = block_to_first_slot[-1]
    num_slots = needed if static_rows is None else static_rows
    if needed > num_slots:
        is_kept = pair_to_slot < num_slots
        pair_to_row, pair_to_k, pair_to_slot = pair_to_row[is_kept], pair_to_k[is_kept], pair_to_slot[is_kept]
        firsts = torch.tensor(block_to_first_slot, device=device).clamp(max=num_slots)
        num_rows, block_to_first_slot = torch.minimum(num_rows, num_slots - firsts[:-1]), tuple(firsts.tolist())
    return ExpertDistribution(pair_to_row, pair_to_k, pair_to_slot, num_rows, block_to_first_slot, needed, num_slots)
