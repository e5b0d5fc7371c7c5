"""DeepEP's buffer (version 2) on fusco, in its expanded layout: rows by local expert, as experts need them.

Contract: DeepEP 2.1 (dd758ca), ``deep_ep/buffers/elastic.py`` (MIT licence), and its callers in SGLang and vLLM.
Everything runs on the current stream: previous events are waited for first, ``async_with_compute_stream`` gives an
event recorded after the call. ``num_sms`` is the maximum number of multiprocessors, by default fusco's, for a combine
that of its dispatch. Nothing here has gradients: frameworks call it from their own autograd functions. Other arguments
that a docstring does not name are accepted and ignored: fusco sees rows when they come, FP8 with scales, too, derives
nodes from the hosts, is deterministic, and ends waits after 60 s.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
import torch.distributed as dist

from fusco.api.autograd import rows_of_weights, weights_of_slots
from fusco.core.config import Launch, StaticRows
from fusco.cuda.tuning import FSDP_SMS
from fusco.integrations.along_handles import biases_of, require_handle, require_shape
from fusco.integrations.ep_handle import DispatchSizes, EPHandle
from fusco.integrations.events import EventHandle, EventOverlap, finished, wait_for
from fusco.integrations.expert_rows import ExpertRows, ends_in_blocks, in_blocks
from fusco.integrations.growth import GrowingCommunicators

_UNSUPPORTED = ("engram_", "pp_", "agrs_", "create_agrs_session", "destroy_agrs_session", "all_gather")
_NO_BUFFER_BYTES = 1  # of size hints: memory is allocated by the calls' own sizes


class ElasticBuffer:
    """Dispatch and combine among the ranks of a group, by the calls of DeepEP's second version."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        num_bytes: int | None = None,
        num_cpu_bytes: int = 0,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        deterministic: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
        prefer_overlap_with_compute: bool = True,
        sl_idx: int = 3,
        num_allocated_qps: int = 0,
        num_cpu_timeout_secs: int = 300,
        num_gpu_timeout_secs: int = 100,
        explicitly_destroy: bool = False,
    ) -> None:
        """Nothing is allocated before the first call, and calls may be larger than these sizes.

        Args:
            group: ranks among which experts are distributed, in equal runs of consecutive experts; of any backend.
            num_bytes, explicitly_destroy: kept as attributes; ``destroy`` always works.
            num_cpu_bytes: must be 0.
            num_max_tokens_per_rank: tokens of a rank in calls without one of their own.
            prefer_overlap_with_compute: halves ``get_theoretical_num_sms``.
        """
        if num_cpu_bytes:
            raise NotImplementedError(
                f"fusco's ElasticBuffer has no buffers on the CPU, got num_cpu_bytes={num_cpu_bytes}"
            )
        self.group, self.rank_idx, self.num_ranks = group, dist.get_rank(group), dist.get_world_size(group)
        self.num_bytes = _NO_BUFFER_BYTES if num_bytes is None else num_bytes
        self.num_max_tokens_per_rank, self.explicitly_destroy = num_max_tokens_per_rank, explicitly_destroy
        self.prefer_overlap_with_compute = prefer_overlap_with_compute
        self.num_scaleout_ranks, self.num_scaleup_ranks = self.get_logical_domain_size()
        self.scaleout_rank_idx, self.scaleup_rank_idx = 0, self.rank_idx
        self._comms = GrowingCommunicators(group)

    def destroy(self) -> None:
        """Release all resources without waiting for other ranks; the buffer cannot be used afterwards."""
        self._comms.abort()

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
        return _NO_BUFFER_BYTES

    @staticmethod
    def capture() -> EventHandle:
        """Return an event recorded on the current stream."""
        return EventHandle()

    def get_comm_stream(self) -> torch.cuda.Stream:
        """Return the current stream, on which everything runs."""
        return torch.cuda.current_stream()

    def barrier(self, use_comm_stream: bool = True, with_cpu_sync: bool = False, sequential: bool = True) -> None:
        """Wait for all ranks on the host, as all arguments allow."""
        dist.barrier(self.group)

    def get_physical_domain_size(self) -> tuple[int, int]:
        """Return one node with all ranks: callers need not know which ranks share one."""
        return 1, self.num_ranks

    def get_logical_domain_size(self) -> tuple[int, int]:
        """Return the same."""
        return self.get_physical_domain_size()

    def get_theoretical_num_sms(
        self,
        num_experts: int,
        num_topk: int,
        num_scaleout_topk: int = 0,
        rdma_gbs: float = 0,
        nvlink_gbs: float = 0,
        sm_read_gbs: float = 200,
        sm_write_gbs: float = 50,
    ) -> int:
        """Return the multiprocessors that fusco uses while other kernels compute, or twice as many; for any sizes."""
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
        previous_event: EventHandle | None = None,
        previous_event_before_epilogue: EventHandle | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        handle: EPHandle | None = None,
        do_handle_copy: bool = True,
        do_cpu_sync: bool | None = None,
        do_expand: bool = False,
        do_zero_padding: bool = False,
        use_tma_aligned_col_major_sf: bool = False,
    ) -> tuple[torch.Tensor | tuple[torch.Tensor, ...], None, torch.Tensor | None, EPHandle, EventOverlap]:
        """Send tokens to their experts; rows arrive by local expert, then source rank, then token.

        Args:
            x: (num_tokens, hidden), or FP8 rows and their scales (num_tokens, ...) of any strides.
            topk_idx: int64 (num_tokens, num_topk), -1 for no expert; ``None`` with a handle.
            topk_weights: float32 (num_tokens, num_topk).
            cumulative_local_expert_recv_stats: int32 (num_local_experts,), to which rows without padding are added.
            num_experts: of all ranks together.
            num_max_tokens_per_rank: for the number of rows without a wait of the host.
            expert_alignment: every expert's block is padded with zero rows to a multiple of this.
            handle: of an earlier dispatch: the same routing, sizes and alignment.
            do_handle_copy: copy ``topk_idx`` into the handle.
            do_cpu_sync: ``False``: as many rows as ranks with ``num_max_tokens_per_rank`` tokens can need, without a
                wait of the host. Those behind the last block are undefined.
            do_expand: must be true, except with a handle.
            do_zero_padding: padding is zero in any case.
            use_tma_aligned_col_major_sf: must be false.

        Returns:
            Rows (num_rows, hidden), or rows and scales; ``None``; the weight of each row, float32 (num_rows,), or
            ``None`` without weights; the handle; the event.
        """
        given = x if isinstance(x, tuple) else (x,)
        comms, asked, static = self._comms, None, None
        if handle is not None:
            with comms.rejecting():
                comms = require_handle(handle, EPHandle).sent.comms
        with comms.rejecting():
            wait_for(previous_event, previous_event_before_epilogue)
            if use_tma_aligned_col_major_sf:
                _refuse("use_tma_aligned_col_major_sf=True")
            payloads, launch = [each.contiguous() for each in given], Launch(num_sms=num_sms or None)
            topk_weights = None if topk_weights is None else topk_weights.float()
            if handle is not None:
                sizes = {"num_experts": num_experts, "num_max_tokens_per_rank": num_max_tokens_per_rank}
                _require_as_sent(handle, topk_idx, expert_alignment=expert_alignment, **sizes)
                require_shape("topk_weights", topk_weights, *handle.topk_idx.shape)
            else:
                if not do_expand:
                    _refuse("do_expand=False (version 1's Buffer has that layout)")
                if topk_idx is None or num_experts is None:
                    raise ValueError("dispatch needs topk_idx and num_experts, or a handle")
                kept_idx = topk_idx.clone() if do_handle_copy else topk_idx
                max_tokens = num_max_tokens_per_rank or self.num_max_tokens_per_rank
                asked = DispatchSizes(num_experts, expert_alignment or 1, max_tokens, num_sms, kept_idx)
                static = self._static_rows(asked) if do_cpu_sync is False else None
            num_local = (handle or asked).num_experts // self.num_ranks  # type: ignore[union-attr]
            require_shape("cumulative_local_expert_recv_stats", cumulative_local_expert_recv_stats, num_local)
        if asked is not None:
            handle = _dispatch(ExpertRows(comms, asked.num_experts), payloads, topk_weights, asked, static, launch)
            rows, weights = handle.sent.dispatched.payloads, handle.sent.dispatched.weights
        else:
            assert handle is not None
            rows, of_rows = handle.sent.dispatch_again(payloads, topk_weights, launch)
            weights = None if of_rows is None else weights_of_slots(of_rows, handle.sent.handle)
        if cumulative_local_expert_recv_stats is not None:
            cumulative_local_expert_recv_stats += handle.num_unaligned_recv_tokens_per_expert
        received = rows if isinstance(x, tuple) else rows[0]
        return received, None, weights, handle, finished(async_with_compute_stream)

    @torch.no_grad()
    def combine(
        self,
        x: torch.Tensor,
        handle: EPHandle,
        topk_weights: torch.Tensor | None = None,
        bias: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: EventHandle | None = None,
        previous_event_before_epilogue: EventHandle | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap]:
        """Add up the rows of each token, without weights.

        Args:
            x: (num_rows, hidden) in the layout of the dispatch.
            handle: of the dispatch.
            topk_weights: float32 (num_rows,), a value of each row that goes back to its token and expert.
            bias: one or two tensors (num_tokens, hidden), added to the sums.

        Returns:
            Sums (num_tokens, hidden); the values, float32 (num_tokens, num_topk), or ``None``; the event.
        """
        with self._comms.rejecting():
            sent = require_handle(handle, EPHandle).sent
        with sent.rejecting():
            wait_for(previous_event, previous_event_before_epilogue)
            parts = [x.contiguous()]
            if topk_weights is not None:
                parts.append(rows_of_weights(topk_weights.reshape(-1).float(), sent.handle))
            launch = Launch(num_sms=num_sms or handle.num_sms or None)
            biases = biases_of(bias, sent.handle.num_tokens, *x.shape[1:])
        return *sent.sums_of(parts, launch, biases), finished(async_with_compute_stream)

    def __getattr__(self, name: str) -> Any:
        if name.startswith(_UNSUPPORTED):
            _refuse(name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _static_rows(self, asked: DispatchSizes) -> StaticRows:
        if not asked.num_max_tokens_per_rank:
            raise ValueError("dispatch with do_cpu_sync=False needs num_max_tokens_per_rank")
        alignment, num_local = asked.expert_alignment, asked.num_experts // self.num_ranks
        num_pairs = self.num_ranks * asked.num_max_tokens_per_rank * min(asked.topk_idx.shape[1], num_local)
        return StaticRows(-(-(num_pairs + num_local * (alignment - 1)) // alignment) * alignment)


def _dispatch(
    expert_rows: ExpertRows,
    payloads: list[torch.Tensor],
    topk_weights: torch.Tensor | None,
    asked: DispatchSizes,
    static: StaticRows | None,
    launch: Launch,
) -> EPHandle:
    alignment = asked.expert_alignment
    options = {"expert_alignment": alignment, "static": static, "launch": launch}
    has_weights = topk_weights is not None
    sent = expert_rows.dispatch(payloads, asked.topk_idx, topk_weights, with_weights=has_weights, **options)
    counts = sent.dispatched.num_rows_per_expert
    on_host = [] if static else in_blocks(sent.counts_on_host, alignment).tolist()
    return EPHandle(
        **vars(asked),
        num_expanded_tokens=len(sent.dispatched.rows),
        num_recv_tokens_per_expert_list=on_host,
        num_unaligned_recv_tokens_per_expert=counts.int(),
        psum_num_recv_tokens_per_expert=ends_in_blocks(counts, alignment),
        sent=sent,
    )


def _require_as_sent(handle: EPHandle, topk_idx: torch.Tensor | None, **sizes: int | None) -> None:
    """Raise ``ValueError`` for arguments that differ from those of the handle's dispatch."""
    if topk_idx is not None:
        raise ValueError("a handle has its routing: topk_idx must be None with it")
    for name, size in sizes.items():
        if size is not None and size != (known := getattr(handle, name)):
            raise ValueError(f"{name} is {size}, but {known} in the handle's dispatch")


def _refuse(what: str) -> NoReturn:
    raise NotImplementedError(f"fusco's ElasticBuffer has DeepEP's expanded dispatch and combine only, not {what}")
