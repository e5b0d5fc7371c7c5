"""The handle that ``EPBuffer`` returns of a dispatch, with DeepEP's names of attributes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from fusco.core.integers import check_integer
from fusco.integrations.along_handles import require_shape
from fusco.integrations.deep_ep.rank_rows import RankRouting
from fusco.integrations.expert_rows import SentRows, ends_in_blocks, in_blocks


@dataclass(eq=False, kw_only=True)
class DispatchSizes:
    """Sizes and routing that a dispatch was asked for."""

    do_expand: bool  # rows are by local expert; otherwise by source rank, one for each token and rank
    num_experts: int  # of all ranks together
    expert_alignment: int  # of the experts' blocks, in rows
    num_max_tokens_per_rank: int  # as given, or that of the buffer; 0 for none
    num_sms: int  # as given; 0 means fusco's default
    topk_idx: torch.Tensor  # int64 (num_tokens, num_topk), a copy if ``do_handle_copy`` was true

    def __post_init__(self) -> None:
        check_integer("expert_alignment", self.expert_alignment, least=1)

    def num_static_rows(self, num_ranks: int) -> int:
        """Return as many rows as ranks with the maximum of tokens can need."""
        if not self.num_max_tokens_per_rank:
            raise ValueError("dispatch with do_cpu_sync=False needs num_max_tokens_per_rank")
        num_tokens, alignment = num_ranks * self.num_max_tokens_per_rank, self.expert_alignment
        if not self.do_expand:
            return num_tokens
        num_local = self.num_experts // num_ranks
        num_pairs = num_tokens * min(self.topk_idx.shape[1], num_local)
        return -(-(num_pairs + num_local * (alignment - 1)) // alignment) * alignment

    def handle(
        self,
        sent: SentRows | RankRouting,
        sources: torch.Tensor,
        counts: torch.Tensor,
        blocks_on_host: list[int],
        recv_topk_idx: torch.Tensor | None = None,
    ) -> EPHandle:
        """Return the handle of a dispatch that was asked for this, see the attributes there."""
        return EPHandle(
            **vars(self),
            num_recv_tokens_per_expert_list=blocks_on_host,
            num_unaligned_recv_tokens_per_expert=counts,
            recv_topk_idx=recv_topk_idx,
            sent=sent,
            sources=sources,
        )


@dataclass(eq=False, kw_only=True)
class EPHandle(DispatchSizes):
    """A dispatch; any number of combines and other dispatches along it may use it.

    What engines read is there when the dispatch returns; where each row came from is computed when it is first read.
    Device tensors are int32.
    """

    # rows of each local expert with padding; empty without a wait of the host
    num_recv_tokens_per_expert_list: list[int]
    num_unaligned_recv_tokens_per_expert: torch.Tensor  # without padding (num_local_experts,)
    recv_topk_idx: torch.Tensor | None  # local experts of each row by source rank, int64 (num_rows, num_topk)
    sent: SentRows | RankRouting  # fusco's own
    sources: torch.Tensor  # source rank and token of each row, int32 (num_rows, 2); undefined for padding

    def require_same(
        self, topk_idx: torch.Tensor | None, stats: torch.Tensor | None, sizes: dict[str, int | None]
    ) -> None:
        """Raise ``ValueError`` for arguments that differ from those of the handle's dispatch."""
        if topk_idx is not None:
            raise ValueError("a handle has its routing: topk_idx must be None with it")
        for name, size in sizes.items():
            if size is not None and size != (known := getattr(self, name)):
                raise ValueError(f"{name} is {size}, but {known} in the handle's dispatch")
        num_local = len(self.num_unaligned_recv_tokens_per_expert)
        require_shape("cumulative_local_expert_recv_stats", stats, num_local)

    def weights_of_rows(self, of_rows: torch.Tensor | None) -> torch.Tensor | None:
        """Return weights that came along the handle, zero for other ranks' experts."""
        if of_rows is None or self.recv_topk_idx is None:
            return of_rows
        return of_rows.masked_fill(self.recv_topk_idx < 0, 0)

    @property
    def num_expanded_tokens(self) -> int:
        """Rows by local expert, with padding; 0 for rows by source rank."""
        return len(self.sources) if self.do_expand else 0

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
        return self.num_max_tokens_per_rank or self.sent.capacity.max_tokens_per_rank

    @property
    def _global_tokens(self) -> torch.Tensor:
        """Column 0 of the metadata, of each row: int64 (num_rows,)."""
        return self.sources[:, 0].long() * self._stride + self.sources[:, 1]

    @cached_property
    def _slots_of_tokens(self) -> torch.Tensor:
        """Rows of all tokens of all ranks for their experts: int64 (num_ranks x stride, num_topk), -1 for none."""
        counts = self.num_unaligned_recv_tokens_per_expert
        rows = torch.arange(len(self.sources), device=counts.device)
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
