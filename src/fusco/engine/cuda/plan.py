"""A plan that was made on the device, and never left it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from fusco.placement import ExpertPlacement


@dataclass(frozen=True, kw_only=True)
class DevicePlan:
    """See ``fusco.engine.base.Plan``. "Row" counts the tokens of all ranks, by source rank.

    Attributes:
        rank: the rank whose plan it is.
        placement: which rank owns which expert.
        first_row: ``num_ranks + 1`` entries; rank ``r`` has rows ``first_row[r]`` to ``first_row[r + 1]``.
        num_slots: rows of the expert-major output.
        row_to_slots: int32 (num_rows, num_topk): the slot of each pair; -1 if its expert is elsewhere, -2 if dropped.
        weights: float32 or float64 (num_rows, num_topk), or ``None``.
        num_rows_per_expert: int64 (num_local_experts,), padding not counted.
        block_to_first_slot: int32 (num_local_experts + 1,).
        token_to_ranks: int32 (num_tokens,); bit ``r`` is set if rank ``r`` owns an expert of this rank's token.

    """

    rank: int
    placement: ExpertPlacement
    first_row: tuple[int, ...]
    num_slots: int
    row_to_slots: torch.Tensor
    weights: torch.Tensor | None
    num_rows_per_expert: torch.Tensor
    block_to_first_slot: torch.Tensor
    token_to_ranks: torch.Tensor

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All that it holds on the device."""
        optional = [] if self.weights is None else [self.weights]
        always = [self.row_to_slots, self.num_rows_per_expert, self.block_to_first_slot, self.token_to_ranks]
        return always + optional

    def num_tokens_of(self, rank: int) -> int:
        """Tokens of a rank."""
        return self.first_row[rank + 1] - self.first_row[rank]

    @property
    def num_tokens(self) -> int:
        """Tokens of this rank."""
        return self.num_tokens_of(self.rank)

    @property
    def longest(self) -> int:
        """Most tokens of any rank."""
        return max(map(self.num_tokens_of, range(len(self.first_row) - 1)))

    @property
    def num_topk(self) -> int:
        """Expert slots of a token."""
        return self.row_to_slots.shape[1]

    @cached_property
    def slot_weights(self) -> torch.Tensor:
        """The weight of the row in each slot (num_slots,); zero where none stands."""
        assert self.weights is not None, "there are no weights by slot without weights"
        return self._by_slot(self.weights)

    @cached_property
    def slot_to_k(self) -> torch.Tensor:
        """Which of its token's experts a slot's row is for, int64 (num_slots,); 0 where none stands."""
        k = torch.arange(self.num_topk, device=self.row_to_slots.device)
        return self._by_slot(k.expand(self.row_to_slots.shape))

    def _by_slot(self, values: torch.Tensor) -> torch.Tensor:
        # One slot more, for all pairs that have none.
        slots = torch.where(self.row_to_slots < 0, self.num_slots, self.row_to_slots).long()
        return values.new_zeros(self.num_slots + 1).scatter_(0, slots.view(-1), values.reshape(-1))[:-1]
