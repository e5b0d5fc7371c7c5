"""HybridEP's buffer on fusco: rows arrive expert-major, so that dispatch and permute are one.

Contract: DeepEP, branch hybrid-ep, ``deep_ep/hybrid_ep_buffer.py`` (MIT licence), and its callers in Megatron-core
0.19 and NeMo Automodel 0.7. Arguments that a docstring does not name are accepted and ignored: rows may come as uint8
with scales in any call, kernels are cached always, and fusco has no permutation apart, blocks, or shared buffers to
set.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from fusco.core.checked_ids import num_topk_of
from fusco.core.config import Launch, StaticRows
from fusco.integrations.along_handles import element_of, require_shape
from fusco.integrations.deep_ep.base import BufferBase, payloads_of
from fusco.integrations.deep_ep.rank_rows import RankRouting, ranks_of
from fusco.integrations.expert_rows import ExpertRows, SentRows, in_blocks
from fusco.integrations.routing_maps import RoutingMaps

_COUNTS = 1  # place in a handle


class HybridEPBuffer(BufferBase):
    """Dispatch and combine among the ranks of a group, by the calls of HybridEP.

    ``configurer.buffer_config`` has the sizes that callers compare before a call.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        hidden_dim: int,
        max_num_of_tokens_per_rank: int,
        num_local_experts: int,
        use_fp8: bool = False,
        num_sms_dispatch_api: int | None = None,
        num_sms_combine_api: int | None = None,
        num_sms_preprocessing_api: int | None = None,
        num_blocks_permute: int | None = None,
        num_blocks_unpermute: int | None = None,
        load_cached_kernels: bool = False,
        use_shared_buffer: bool = True,
        enable_custom_allgather: bool = False,
        num_of_hybrid_ep_ranks_per_nvlink_domain: int | None = None,
        use_mnnvl: bool | None = None,
    ) -> None:
        """Set sizes; nothing is allocated before the first call, and calls may be larger.

        Args:
            group: ranks among which experts are distributed, in equal runs of consecutive experts.
            hidden_dim: elements of a row.
            max_num_of_tokens_per_rank: tokens of a call at first.
            num_local_experts: experts of each rank, unless a call says otherwise.
            num_sms_dispatch_api, num_sms_combine_api: SMs; ``None`` means fusco's default.
            num_of_hybrid_ep_ranks_per_nvlink_domain: ranks of a node; ``None`` derives nodes from the hosts.
        """
        super().__init__(group, num_of_hybrid_ep_ranks_per_nvlink_domain)
        self.hidden_dim, self.num_local_experts = hidden_dim, num_local_experts
        self.group_size, self.rank = self._num_ranks, self._rank
        self._ranks_per_node = num_of_hybrid_ep_ranks_per_nvlink_domain or self.group_size
        self.num_of_hybrid_ep_ranks_per_nvlink_domain = self._ranks_per_node
        self.num_of_nodes, self.local_rank = self.group_size // self._ranks_per_node, self.rank % self._ranks_per_node
        self.max_num_of_tokens_per_rank = max_num_of_tokens_per_rank
        sizes = {"max_num_of_tokens_per_rank": max_num_of_tokens_per_rank, "num_of_experts_per_rank": num_local_experts}
        self.configurer = SimpleNamespace(buffer_config=SimpleNamespace(hidden_dim=hidden_dim, **sizes))
        self._num_experts = num_local_experts * self.group_size
        self._maps = RoutingMaps()
        self._dispatch_sms, self._combine_sms = num_sms_dispatch_api, num_sms_combine_api
        self._dispatch_launch = Launch(num_sms=num_sms_dispatch_api)
        Launch(num_sms=num_sms_combine_api)  # which checks it

    def empty_jit_cache(self) -> None:
        """Do nothing: kernels of fusco are the same for all sizes."""

    def update_template_config(
        self,
        hidden_dim: int | None = None,
        num_of_tokens_per_rank: int | None = None,
        num_local_experts: int | None = None,
        pad_multiple: int | None = None,
        use_fp8: bool | None = None,
        fuse_permute_dispatch: bool = False,
        **kwargs: Any,
    ) -> None:
        """Do nothing: fusco has no templates for sizes."""

    @torch.no_grad()
    def dispatch_with_permute(
        self,
        *,
        hidden: torch.Tensor,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        num_of_experts_per_rank: int | None = None,
        num_of_experts: int | None = None,
        use_fp8: bool | None = None,
        routing_map: torch.Tensor | None = None,
        probs: torch.Tensor | None = None,
        scaling_factor: torch.Tensor | None = None,
        num_permuted_tokens: int | torch.Tensor | None = None,
        pad_multiple: int | None = None,
        handle: tuple[Any, ...] | None = None,
        non_blocking: bool = False,
        fuse_permute_dispatch: bool = False,
        num_dispatched_tokens: int | None = None,
        use_host_meta: bool | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor, tuple[Any, ...]]:
        """Send tokens to their experts; rows arrive by local expert, then source rank, then token.

        Args:
            hidden: (num_tokens, hidden_dim), bfloat16 or any other dtype; uint8 with ``scaling_factor`` for FP8.
            topk_idx: int64 (num_tokens, num_topk), -1 for no expert; unused if there is a map.
            topk_weights: float32 (num_tokens, num_topk); unused if there are ``probs``.
            num_of_experts_per_rank: experts of each rank.
            num_of_experts: experts of all ranks together.
            routing_map: bool (num_tokens, num_experts).
            probs: float32 (num_tokens, num_experts), the weights.
            scaling_factor: float32 (num_tokens, hidden_dim / 128).
            num_permuted_tokens: with ``non_blocking`` and without a handle, the number of rows of the output; those
                that do not fit are dropped, the last experts' first. Otherwise ignored.
            pad_multiple: every expert's block is padded with zero rows to a multiple of this; along a handle that of
                its dispatch, or ``None``.
            handle: of an earlier dispatch: the same routing, which is not planned again.
            non_blocking: do not wait for the number of rows; needs ``num_permuted_tokens``.

        Returns:
            Rows (num_rows, hidden_dim); the weight of each row, float32 (num_rows,), or ``None`` without weights; the
            scales of each row or ``None``; the rows of each local expert with padding, int64, in host memory unless
            ``non_blocking``; the handle, whose last element is int32 (1,) on the device, one if something was dropped.
        """
        x = (hidden,) if scaling_factor is None else (hidden, scaling_factor)
        if handle is not None:
            sent, rows, row_weights = self._dispatch_again(
                lambda: _sent(handle, pad_multiple), x, (topk_weights, probs), num_sms=self._dispatch_sms
            )
            counts = handle[_COUNTS]
        else:
            with self._comms.rejecting():
                num_experts = self._count_experts(num_of_experts_per_rank, num_of_experts, routing_map)
                given, sizes = (probs, topk_weights), (len(hidden), num_experts)
                ids, weights = self._routing("dispatch_with_permute", routing_map, topk_idx, given, sizes)
                static = _static_rows(num_permuted_tokens) if non_blocking else None
                payloads = payloads_of(x)
            sent = ExpertRows(self._comms, num_experts, self.max_num_of_tokens_per_rank, may_differ=True).dispatch(
                payloads,
                ids,
                weights,
                verb="dispatch_with_permute",
                with_weights=weights is not None,
                expert_alignment=pad_multiple or 1,
                static=static,
                launch=self._dispatch_launch,
            )
            self._maps.widen(sent.require_topk_idx().shape[1])
            counts, overflow = self._counts(sent, non_blocking)
            rows, row_weights = sent.dispatched.payloads, sent.dispatched.weights
            handle = (sent, counts, *[None] * 8, overflow)
        return rows[0], row_weights, rows[1] if len(rows) > 1 else None, counts, handle

    def _counts(self, sent: SentRows, non_blocking: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rows of each local expert with padding, and int32 (1,): one if something was dropped."""
        counts = sent.dispatched.num_rows_per_expert
        if not non_blocking:
            counts = sent.blocks_on_host
            with self._comms.rejecting():
                self._maps.require_none_lost()
            return counts, sent.require_topk_idx().new_zeros(1, dtype=torch.int32)
        has_overflow = sent.dispatched.num_rows_needed > len(sent.dispatched.rows)
        if self._maps.lost is not None:
            has_overflow |= self._maps.lost > 0
        return counts if sent.alignment == 1 else in_blocks(counts, sent.alignment), has_overflow.int()

    @torch.no_grad()
    def combine_with_unpermute(
        self,
        *,
        hidden: torch.Tensor,
        probs: torch.Tensor | None = None,
        handle: tuple[Any, ...] | None = None,
        pad_multiple: int | None = None,
        fuse_unpermute_combine: bool = False,
        num_dispatched_tokens: int | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Add up the rows (num_rows, hidden_dim) of each token in the layout of the dispatch, without weights.

        ``probs`` are values of rows, float32 (num_rows,), that go back to their tokens and experts. Returns sums
        (num_tokens, hidden_dim), and the values as float32 (num_tokens, num_experts), zero for experts that a token was
        not sent to; ``None`` without ``probs``.
        """
        sent, sums, values = self._combine(
            lambda: _sent(handle, pad_multiple), hidden, probs, num_sms=self._combine_sms
        )
        return sums, None if values is None else sent.by_expert(values).contiguous()

    @torch.no_grad()
    def dispatch(
        self,
        hidden: torch.Tensor,
        scaling_factor: torch.Tensor | None = None,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        num_of_experts: int | None = None,
        probs: torch.Tensor | None = None,
        routing_map: torch.Tensor | None = None,
        num_dispatched_tokens_tensor: torch.Tensor | None = None,
        num_dispatched_tokens: int | None = None,
        handle: tuple[Any, ...] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, tuple[Any, ...]]:
        """Send every token once to each rank that has an expert for it; rows arrive by source rank, then token.

        Arguments as in ``dispatch_with_permute``.

        Returns:
            Rows (num_rows, hidden_dim); weights, float32 (num_rows, experts of the node), of this rank's experts, or
            ``None``; scales or ``None``; the handle, whose element 3 is the number of rows, int32 (1,) on the host, and
            whose element 4 is the map of rows to local experts, bool (num_rows, num_local_experts).
        """
        x = (hidden,) if scaling_factor is None else (hidden, scaling_factor)
        if handle is not None:
            sent, rows, weights = self._dispatch_again(
                lambda: _routing_of(handle), x, (topk_weights, probs), num_sms=self._dispatch_sms
            )
        else:
            with self._comms.rejecting():
                num_experts = self._count_experts(None, num_of_experts, routing_map)
                given, sizes = (probs, topk_weights), (len(hidden), num_experts)
                topk_idx, topk_weights = self._routing("dispatch", routing_map, topk_idx, given, sizes)
                is_token_in_rank = ranks_of(topk_idx, num_experts, self.group_size)
                routing = (topk_idx, topk_weights, num_experts)
            rows, sent = self._by_rank.dispatch(x, is_token_in_rank, routing, launch=self._dispatch_launch)
            with sent.rejecting():
                self._maps.require_none_lost()
            weights = None if topk_weights is None else sent.weights()
            num_rows = torch.tensor([len(rows[0])], dtype=torch.int32, device="cpu")
            handle = (sent, None, None, num_rows, sent.local_map(), len(hidden), None)
        of_node = None
        if weights is not None:
            of_node = weights.new_zeros(len(weights), sent.num_local_experts * self._ranks_per_node)
            of_node[:, self._local(sent)] = sent.by_local_expert(weights)
        return rows[0], of_node, rows[1] if len(rows) > 1 else None, handle

    @torch.no_grad()
    def combine(
        self, hidden: torch.Tensor, probs: torch.Tensor | None = None, handle: tuple[Any, ...] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Add up the rows (num_rows, hidden_dim) of each token, one from each rank, in the layout of ``dispatch``.

        ``probs`` are values of this rank's experts, float32 (num_rows, experts of the node). Returns sums
        (num_tokens, hidden_dim), and the values as float32 (num_tokens, num_experts) or ``None``.
        """

        def pairs(sent: RankRouting, probs: torch.Tensor) -> torch.Tensor:
            require_shape("probs", probs, len(sent.words), sent.num_local_experts * self._ranks_per_node)
            sent.require_topk_idx()
            return sent.values_of_pairs(probs[:, self._local(sent)].float())

        sent, sums, values = self._combine(
            lambda: _routing_of(handle), hidden, probs, num_sms=self._combine_sms, prepare=pairs
        )
        return sums, None if values is None else sent.by_expert(values)

    def _count_experts(self, per_rank: int | None, of_all: int | None, routing_map: torch.Tensor | None) -> int:
        """Return the experts of all ranks in a call, by default the buffer's; layers may have different numbers.

        Raises ``ValueError`` if the arguments disagree, or do not divide among the ranks.
        """
        given = {"num_of_experts_per_rank": (per_rank or 0) * self.group_size, "num_of_experts": of_all or 0}
        given["columns of routing_map"] = 0 if routing_map is None else routing_map.shape[1]
        counts = {name: count for name, count in given.items() if count}
        num_experts = next(iter(counts.values()), self._num_experts)
        if num_experts % self.group_size or len(set(counts.values())) > 1:
            listed = ", ".join(f"{name}: {count}" for name, count in counts.items())
            raise ValueError(f"numbers of experts differ, or do not divide among {self.group_size} ranks: {listed}")
        return num_experts

    def _routing(
        self,
        verb: str,
        routing_map: torch.Tensor | None,
        topk_idx: torch.Tensor | None,
        given_weights: tuple[torch.Tensor | None, torch.Tensor | None],
        sizes: tuple[int, int],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the experts of tokens and their weights, of which a map and ``probs`` precede the others.

        ``sizes`` are the numbers of tokens, and of experts of all ranks.
        """
        (probs, topk_weights), (num_tokens, num_experts) = given_weights, sizes
        self._maps.lost = None  # of an earlier map
        if routing_map is not None:
            topk_idx = self._maps.indices_of(routing_map)
        if topk_idx is None:
            raise ValueError(f"{verb} needs one of routing_map, topk_idx and handle")
        num_topk_of(topk_idx, num_tokens)
        if probs is None:
            require_shape("topk_weights", topk_weights, *topk_idx.shape)
            return topk_idx, None if topk_weights is None else topk_weights.float()
        require_shape("probs", probs, len(topk_idx), num_experts)
        return topk_idx, probs.float().gather(1, topk_idx.clamp(0, num_experts - 1))

    def _local(self, sent: RankRouting) -> slice:
        """Return the columns of this rank's experts among those of its node."""
        num_local = sent.num_experts // self.group_size
        return slice(self.local_rank * num_local, (self.local_rank + 1) * num_local)


def _sent(handle: Any, pad_multiple: int | None) -> SentRows:
    sent = element_of(handle, 0, SentRows, "dispatch_with_permute of a HybridEPBuffer")
    if pad_multiple and pad_multiple != sent.alignment:
        raise ValueError(f"pad_multiple is {pad_multiple}, but the handle's rows are in blocks of {sent.alignment}")
    return sent


def _routing_of(handle: Any) -> RankRouting:
    return element_of(handle, 0, RankRouting, "dispatch of a HybridEPBuffer")


def _static_rows(num_permuted_tokens: int | torch.Tensor | None) -> StaticRows:
    if num_permuted_tokens is None:
        raise ValueError("dispatch_with_permute with non_blocking=True needs num_permuted_tokens")
    return StaticRows(int(num_permuted_tokens), on_overflow="drop")
