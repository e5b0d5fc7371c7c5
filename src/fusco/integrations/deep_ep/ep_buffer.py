"""DeepEP's ``EPBuffer`` (2.5; in 2.1 ``ElasticBuffer``) on fusco: rows by local expert, or by source rank.

Contract: ``deep_ep/buffers/elastic.py`` of DeepEP 2.1 (dd758ca), ``buffers/ep.py`` of 2.5 (MIT licence), and their
callers in SGLang, vLLM and torchtitan. ``num_sms`` is the maximum number of SMs, by default fusco's, for a combine that
of its dispatch. Arguments that a docstring does not name are accepted and ignored: fusco sees rows when they come, FP8
with scales, too, derives nodes from the hosts, is deterministic, and ends waits after 60 s.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.distributed as dist

from fusco.core.config import FSDP_SMS, Launch, Settings, StaticRows
from fusco.integrations.along_handles import require_handle, require_shape
from fusco.integrations.deep_ep.base import SIZE_HINT, Event, like, payloads_of
from fusco.integrations.deep_ep.ep_handle import DispatchSizes, EPHandle
from fusco.integrations.deep_ep.events import EventHandle, EventOverlap, finished, wait_for
from fusco.integrations.deep_ep.expert_copies import BufferAllocator, ExpertCopies
from fusco.integrations.deep_ep.rank_rows import NUM_SOURCE_WORDS, count_of_each, ranks_of
from fusco.integrations.expert_rows import ExpertRows, in_blocks

_TMA_BYTES = 16  # alignment of columns of scales


class EPBuffer(ExpertCopies):
    """Dispatch and combine among the ranks of a group, by the calls of DeepEP 2.5, and of 2.1 by name."""

    _offered = "dispatch and combine"
    _refused = ("engram_", "pp_", "agrs_", "create_agrs_session", "destroy_agrs_session", "all_gather")
    _copies_ids: ClassVar[bool] = False  # into handles, unless a call says otherwise

    def __init__(
        self,
        group: dist.ProcessGroup,
        num_bytes: int | None = None,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        lb_allocation_plan_or_num_bytes: Any = 0,
        deterministic: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
        prefer_overlap_with_compute: bool = True,
        sl_idx: int | None = None,
        num_allocated_qps: int = 0,
        num_cpu_timeout_secs: int = 300,
        num_gpu_timeout_secs: int = 100,
        explicitly_destroy: bool = False,
        *,
        num_cpu_bytes: int = 0,
    ) -> None:
        """Nothing is allocated before the first call, and calls may be larger than these sizes.

        Args:
            group: ranks among which experts are distributed, in equal runs of consecutive experts; of any backend.
            num_bytes, num_allocated_qps, explicitly_destroy: kept as attributes; ``destroy`` always works.
            num_cpu_bytes: must be 0.
            lb_allocation_plan_or_num_bytes: a ``BufferAllocator``, whose tensors get their memory on the current CUDA
                device, or the CPU without one; or a number of bytes, which has no effect.
            num_max_tokens_per_rank: tokens of a rank in calls without one of their own.
            allow_multiple_reduction: if false, sums are rounded once: parts of them travel as float32.
            prefer_overlap_with_compute: halves ``get_theoretical_num_sms``.
        """
        if num_cpu_bytes:
            self._refuse(f"buffers on the CPU (num_cpu_bytes={num_cpu_bytes})")
        super().__init__(group, settings=None if allow_multiple_reduction else Settings(wire_dtype=torch.float32))
        if isinstance(plan := lb_allocation_plan_or_num_bytes, BufferAllocator):
            device = "cuda" if torch.cuda.is_available() else "cpu"
            plan.materialize(torch.empty(plan.num_bytes, dtype=torch.uint8, device=device))
        self.rank_idx, self.num_ranks = self._rank, self._num_ranks
        self.num_bytes = SIZE_HINT if num_bytes is None else num_bytes
        self.num_max_tokens_per_rank, self.explicitly_destroy = num_max_tokens_per_rank, explicitly_destroy
        self.num_allocated_qps, self.prefer_overlap_with_compute = num_allocated_qps, prefer_overlap_with_compute
        self.num_scaleout_ranks, self.num_scaleup_ranks = self.get_logical_domain_size()
        self.scaleout_rank_idx, self.scaleup_rank_idx = 0, self.rank_idx

    @staticmethod
    def get_buffer_size_hint(
        group: dist.ProcessGroup,
        num_max_tokens_per_rank: int,
        hidden: int,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
    ) -> int:
        """Return the same for all sizes."""
        return SIZE_HINT

    @staticmethod
    def capture() -> EventHandle:
        """Return an event recorded on the current stream."""
        return EventHandle()

    def barrier(
        self,
        wait_comm_stream: bool = True,
        with_cpu_sync: bool = False,
        sequential: bool = True,
        context_idx: int | None = None,
        *,
        use_comm_stream: bool = True,
    ) -> None:
        """Wait for all ranks on the host, as all arguments allow."""
        dist.barrier(self.group)

    def get_physical_domain_size(self) -> tuple[int, int]:
        """Return one node with all ranks: callers need not know which ranks share one."""
        return 1, self.num_ranks

    get_logical_domain_size = get_physical_domain_size

    def get_theoretical_num_sms(
        self,
        num_experts: int,
        num_topk: int,
        num_scaleout_topk: int = 0,
        rdma_gbs: float = 0,
        nvlink_gbs: float = 0,
        sm_read_gbs: float = 0,
        sm_write_gbs: float = 0,
    ) -> int:
        """Return the SMs that fusco uses while other kernels compute, or twice as many; for any sizes."""
        return FSDP_SMS if self.prefer_overlap_with_compute else 2 * FSDP_SMS

    def get_theoretical_num_qps(self, num_sms: int) -> int:
        """Return 1: fusco has no such setting."""
        return 1

    @torch.no_grad()
    def dispatch(
        self,
        x: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        cumulative_local_expert_recv_stats: torch.Tensor | None = None,
        num_experts: int | None = None,
        num_max_tokens_per_rank: int | None = None,
        expert_alignment: int | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: Event = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        handle: EPHandle | None = None,
        do_handle_copy: bool | None = None,
        do_cpu_sync: bool | None = None,
        do_expand: bool = False,
        do_zero_padding: bool = False,
        use_tma_aligned_col_major_sf: bool = False,
        defer_epilogue: bool = False,
        *,
        previous_event_before_epilogue: Event = None,
    ) -> tuple[Any, ...] | EventOverlap:
        """Send tokens to their experts.

        Args:
            x: (num_tokens, hidden), or FP8 rows and their scales (num_tokens, ...) of any strides.
            topk_idx: int64 (num_tokens, num_topk), -1 for no expert; ``None`` with a handle.
            topk_weights: float32 (num_tokens, num_topk).
            cumulative_local_expert_recv_stats: int32 (num_local_experts,), to which rows without padding are added.
            num_experts: of all ranks together.
            num_max_tokens_per_rank: for the number of rows without a wait of the host.
            expert_alignment: by local expert, every block is padded with zero rows to a multiple of this; otherwise
                only counts are rounded up.
            handle: of an earlier dispatch: the same routing, layout, sizes and alignment.
            do_handle_copy: copy ``topk_idx`` into the handle; ``None`` means no, and yes for an ``ElasticBuffer``.
            do_cpu_sync: ``False``: as many rows as ranks with ``num_max_tokens_per_rank`` tokens can need, without a
                wait of the host. Those behind the last block are undefined.
            do_expand: rows arrive by local expert, then source rank, then token; otherwise by source rank, then token,
                one for each token and rank.
            do_zero_padding: padding is zero in any case.
            use_tma_aligned_col_major_sf: scales are column-major, columns aligned to 16 bytes. It costs a copy of them.
            defer_epilogue: return the event alone, whose ``current_stream_wait`` returns the other results. They are
                complete before, as everything runs on the current stream.

        Returns:
            Rows (num_rows, hidden), or rows and scales; local experts of each row, int64 (num_rows, num_topk), -1 for
            those of other ranks, or ``None`` by local expert; the weight of each row, float32 (num_rows,), otherwise
            (num_rows, num_topk), zero for other ranks, or ``None`` without weights; the handle; the event.
        """
        events, stats = (previous_event, previous_event_before_epilogue), cumulative_local_expert_recv_stats
        sizes = {"num_experts": num_experts, "num_max_tokens_per_rank": num_max_tokens_per_rank}
        sizes["expert_alignment"] = expert_alignment
        if handle is not None:
            known = handle
            _, rows, of_rows = self._dispatch_again(
                lambda: require_handle(known, EPHandle).sent,
                x,
                (topk_weights, None),
                num_sms=num_sms or None,
                previous_events=events,
                check=lambda _: known.require_same(topk_idx, stats, sizes),
            )
            weights = known.weights_of_rows(of_rows)
        else:
            with self._comms.rejecting():
                wait_for(*events)
                if topk_idx is None or num_experts is None:
                    raise ValueError("dispatch needs topk_idx and num_experts, or a handle")
                copies = self._copies_ids if do_handle_copy is None else do_handle_copy
                asked = DispatchSizes(
                    do_expand=do_expand,
                    num_experts=num_experts,
                    expert_alignment=expert_alignment or 1,
                    num_max_tokens_per_rank=num_max_tokens_per_rank or self.num_max_tokens_per_rank,
                    num_sms=num_sms,
                    topk_idx=topk_idx.clone() if copies else topk_idx,
                )
                require_shape("cumulative_local_expert_recv_stats", stats, num_experts // self.num_ranks)
                static = asked.num_static_rows(self.num_ranks) if do_cpu_sync is False else 0
                payloads, launch = payloads_of(x), Launch(num_sms=num_sms or None)
                given = None if topk_weights is None else topk_weights.float()
            send = self._by_expert if do_expand else self._by_source
            rows, weights, known = send(payloads, given, asked, static, launch)
        if stats is not None:
            stats += known.num_unaligned_recv_tokens_per_expert
        if use_tma_aligned_col_major_sf:
            rows = (rows[0], *map(tma_aligned, rows[1:]))
        event = finished(async_with_compute_stream)
        return _deferred(event, defer_epilogue, like(x, rows), known.recv_topk_idx, weights, known)

    def _by_expert(
        self,
        x: list[torch.Tensor],
        topk_weights: torch.Tensor | None,
        asked: DispatchSizes,
        static: int,
        launch: Launch,
    ) -> tuple[tuple[torch.Tensor, ...], torch.Tensor | None, EPHandle]:
        with self._comms.rejecting():
            sources = self._by_rank.source_words(len(x[0]), x[0].device)
        sent = ExpertRows(self._comms, asked.num_experts).dispatch(
            [*x, sources],
            asked.topk_idx,
            topk_weights,
            verb="expanded dispatch",
            expert_alignment=asked.expert_alignment,
            with_weights=topk_weights is not None,
            static=StaticRows(static) if static else None,
            launch=launch,
        )
        *rows, sources = sent.dispatched.payloads
        counts = sent.dispatched.num_rows_per_expert.int()
        on_host = [] if static else sent.blocks_on_host.tolist()
        return tuple(rows), sent.dispatched.weights, asked.handle(sent, sources, counts, on_host)

    def _by_source(
        self,
        x: list[torch.Tensor],
        topk_weights: torch.Tensor | None,
        asked: DispatchSizes,
        static: int,
        launch: Launch,
    ) -> tuple[tuple[torch.Tensor, ...], torch.Tensor | None, EPHandle]:
        with self._comms.rejecting():
            is_token_in_rank = ranks_of(asked.topk_idx, asked.num_experts, self.num_ranks)
        routing = (asked.topk_idx, topk_weights, asked.num_experts)
        rows, sent = self._by_rank.dispatch(x, is_token_in_rank, routing, num_static_rows=static, launch=launch)
        idx, weights = sent.local_idx_and_weights()
        counts = count_of_each(idx, sent.num_local_experts)
        on_host = [] if static else in_blocks(counts, asked.expert_alignment).tolist()
        handle = asked.handle(sent, sent.words[:, :NUM_SOURCE_WORDS], counts, on_host, idx)
        return rows, None if topk_weights is None else weights, handle

    @torch.no_grad()
    def combine(
        self,
        x: torch.Tensor,
        handle: EPHandle,
        topk_weights: torch.Tensor | None = None,
        bias: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: Event = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        defer_epilogue: bool = False,
        *,
        previous_event_before_epilogue: Event = None,
    ) -> tuple[Any, ...] | EventOverlap:
        """Add up the rows of each token, without weights.

        Args:
            x: (num_rows, hidden) in the layout of the dispatch.
            handle: of the dispatch.
            topk_weights: float32, values of each row that go back to its token and experts: (num_rows,) by local
                expert, otherwise (num_rows, num_topk).
            bias: one or two tensors (num_tokens, hidden), added to the sums.
            defer_epilogue: as in ``dispatch``.

        Returns:
            Sums (num_tokens, hidden); the values, float32 (num_tokens, num_topk), or ``None``; the event.
        """
        _, sums, values = self._combine(
            lambda: require_handle(handle, EPHandle).sent,
            x,
            topk_weights,
            num_sms=num_sms or getattr(handle, "num_sms", 0) or None,
            bias=bias,
            previous_events=(previous_event, previous_event_before_epilogue),
        )
        return _deferred(finished(async_with_compute_stream), defer_epilogue, sums, values)


class ElasticBuffer(EPBuffer):
    """The name that ``EPBuffer`` had up to DeepEP 2.1; its handles have copies of the experts' ids."""

    _copies_ids = True


def tma_aligned(scales: torch.Tensor) -> torch.Tensor:
    """Return scales (num_rows, ...) column-major, each column at a multiple of 16 bytes, as TMA reads them."""
    num_rows, num_columns = scales.shape
    per_unit = _TMA_BYTES // scales.element_size()
    return scales.new_empty(num_columns, -(-num_rows // per_unit) * per_unit).T[:num_rows].copy_(scales)


def _deferred(event: EventOverlap, is_deferred: bool, *results: Any) -> tuple[Any, ...] | EventOverlap:
    """Return results and the event, or the event that returns the results."""
    if not is_deferred:
        return *results, event
    event.register_hook_after_wait(lambda: results)
    return event
