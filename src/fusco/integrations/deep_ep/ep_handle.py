"""The handle that ``EPBuffer`` returns of a dispatch, with DeepEP's names of attributes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from fusco.integrations.deep_ep.rank_rows import RankRouting
from fusco.integrations.expert_rows import SentRows, ends_in_blocks, in_blocks


@dataclass(eq=False, kw_only=True)
class EPHandle:
    """A dispatch; any number of combines and other dispatches along it may use it.

    What engines read is there when the dispatch returns; where each row came from is computed when it is first read.
    Device tensors are int32.
    """

    do_expand: bool  # rows are by local expert; otherwise by source rank, one for each token and rank
    num_experts: int  # of all ranks together
    expert_alignment: int  # of the experts' blocks, in rows
    num_max_tokens_per_rank: int  # as given, or that of the buffer; 0 for none
    num_sms: int  # as given; 0 means fusco's default
    topk_idx: torch.Tensor  # int64 (num_tokens, num_topk), a copy if ``do_handle_copy`` was true
    # rows of each local expert with padding; empty without a wait of the host
    num_recv_tokens_per_expert_list: list[int]
    num_unaligned_recv_tokens_per_expert: torch.Tensor  # without padding (num_local_experts,)
    recv_topk_idx: torch.Tensor | None  # local experts of each row by source rank, int64 (num_rows, num_topk)
    num_rows: int  # of what arrived, with padding
    sent: SentRows | RankRouting  # fusco's own
    sources: torch.Tensor  # source rank and token of each row, int32 (num_rows, 2); undefined for padding

    @property
    def num_expanded_tokens(self) -> int:
        """Rows by local expert, with padding; 0 for rows by source rank."""
        return self.num_rows if self.do_expand else 0

    @property
    def num_recv_tokens(self) -> int:
        """Tokens that came, each counted once; without a wait of the host, the most that there is room for."""
        return len(self.recv_src_metadata)

    @cached_property
    def psum_num_recv_tokens_per_expert(self) -> torch.Tensor:
        """The end of each local expert's rows (num_local_experts,).

        By local expert, the start of its block and the number of its rows. By source rank, the sum of the experts' rows
        with padding.
        """
        counts = self.num_unaligned_recv_tokens_per_expert
        if self.do_expand:
            return ends_in_blocks(counts, self.expert_alignment)
        return in_blocks(counts, self.expert_alignment).cumsum(0).int()

    @cached_property
    def psum_num_recv_tokens_per_scaleup_rank(self) -> torch.Tensor:
        """Tokens that came from each rank and all before it (num_ranks,)."""
        if isinstance(self.sent, RankRouting):
            return self.sent.rows_from_ranks().cumsum(0).int()
        return self._is_token.view(self._num_ranks, -1).sum(1).cumsum(0).int()

    @cached_property
    def recv_src_metadata(self) -> torch.Tensor:
        """Where tokens came from (num_tokens_that_came, 2 + num_topk), in order of source rank and token.

        Column 0 is source rank x ``num_max_tokens_per_rank`` + token, column 1 the token's place among those that came.
        The others are its rows by local expert, -1 for experts of other ranks and for rows by source rank.
        """
        if isinstance(self.sent, RankRouting):
            sources, slots = self._global_tokens, self.sent.local_idx().fill_(-1)
        else:
            first = self._is_token.nonzero()[:, 0] if self.num_recv_tokens_per_expert_list else self._first_tokens()
            sources, slots = first, self._slots_of_tokens[first]
        places = torch.arange(len(sources), device=sources.device)
        return torch.cat([sources[:, None], places[:, None], slots], 1).int()

    @cached_property
    def dst_buffer_slot_idx(self) -> torch.Tensor:
        """The rank of each token's experts (num_tokens, num_topk), -1 for none: fusco sends by it, not by slots."""
        num_local = self.num_experts // self._num_ranks
        return self.topk_idx.div(num_local, rounding_mode="floor").int()

    @property
    def _num_ranks(self) -> int:
        return self.sent.comm.placement.world_size

    @property
    def _stride(self) -> int:
        return self.num_max_tokens_per_rank or self.sent.grown.capacity.max_tokens_per_rank

    @property
    def _global_tokens(self) -> torch.Tensor:
        """Column 0 of the metadata, of each row: int64 (num_rows,)."""
        return self.sources[:, 0].long() * self._stride + self.sources[:, 1]

    @cached_property
    def _slots_of_tokens(self) -> torch.Tensor:
        """Rows of all tokens of all ranks for their experts: int64 (num_ranks x stride, num_topk), -1 for none."""
        counts, num_rows = self.num_unaligned_recv_tokens_per_expert, self.num_rows
        rows = torch.arange(num_rows, device=counts.device)
        ends = self.psum_num_recv_tokens_per_expert
        expert = torch.searchsorted(ends - counts, rows.int(), right=True) - 1
        is_row = rows < ends[expert.clamp(min=0)]
        num_topk = self.topk_idx.shape[1]
        num_pairs = self._num_ranks * self._stride * num_topk
        pairs = self._global_tokens * num_topk + self.sent.handle.plan.slot_to_k
        places = torch.where(is_row, pairs, num_pairs)  # one more, for padding
        return torch.full_like(rows[:1], -1).repeat(num_pairs + 1).scatter_(0, places, rows)[:-1].view(-1, num_topk)

    @property
    def _is_token(self) -> torch.Tensor:
        return (self._slots_of_tokens >= 0).any(1)

    def _first_tokens(self) -> torch.Tensor:
        """Return the tokens that came first, in order, and then the others; the host does not wait."""
        return self._is_token.logical_not().to(torch.uint8).sort(stable=True).indices
