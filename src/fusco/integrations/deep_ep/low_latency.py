"""The low-latency mode of DeepEP's first version on fusco: masked rows of fixed size, for decode in CUDA graphs.

Contract: DeepEP v1.2.1, ``deep_ep/buffer.py``, and main at dd758ca, ``deep_ep/buffers/legacy.py`` (MIT licence), and
their callers in vLLM and SGLang; of NVFP4 rows: branch hybrid-ep at 94a9f8f. E experts of all ranks together, R ranks,
at most T tokens of a rank, H hidden: rows are (E / R, R * T, H), those of an expert in order of source rank, then
token, with counts beside.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from fusco.core.config import Launch, StaticRows
from fusco.core.current_stream import capture_number
from fusco.core.integers import check_integer
from fusco.integrations.along_handles import KeptTensors, require_handle, require_shape
from fusco.integrations.deep_ep.base import SIZE_HINT, BufferBase
from fusco.integrations.deep_ep.events import EventOverlap, finished, waits_for_ranks
from fusco.integrations.deep_ep.low_latency_handle import LowLatencyHandle, as_deep_ep_returns, fp8_format, nvfp4_rows
from fusco.integrations.deep_ep.masks import MaskedCommunicator
from fusco.integrations.expert_rows import ExpertRows, SentRows
from fusco.integrations.group_communicators import GroupCommunicators

Hook = Callable[[], None]
_Result = TypeVar("_Result")
# By which experts tell that their rows are computed, in branch hybrid-ep and in SGLang's calls.
_SIGNALS = {
    *("src_signals", "src_signal_expect_value"),
    *("packed_recv_count", "comp_signal", "block_m", "threshold", "num_sms"),
}


class LowLatencyCalls(BufferBase):
    """The calls of the low-latency mode.

    With ``return_recv_hook`` a call runs on the communicator's stream, and its hook makes the current stream wait: what
    the caller launches between the two overlaps. fusco's kernels wait for peers themselves, so they take SMs in the
    meantime, unlike DeepEP's. On the CPU, and without a hook, a call is complete when it returns.

    With ``enable_shrink`` a rank that fails, leaves or is late (``Settings.timeout_s``) in a call is masked: the other
    ranks make the call again without it, and it has no tokens and no experts from then on. So that all of them do, the
    host waits for each call, and all agree at its end.
    """

    def __init__(self, group: dist.ProcessGroup, *, is_masked: bool = False) -> None:
        super().__init__(group)
        self._masked = MaskedCommunicator(group) if is_masked else None
        self._kept = KeptTensors()
        self._combine_buffers: dict[Any, torch.Tensor] = {}  # by shape, device and capture of a graph

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        """Return the same for all sizes: fusco allocates by the calls' own sizes."""
        return SIZE_HINT

    def destroy(self) -> None:
        """Release all resources without waiting for other ranks; the buffer cannot be used afterwards."""
        super().destroy()
        if self._masked:
            self._masked.abort()

    def clean_low_latency_buffer(self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int) -> None:
        """Wait for all ranks with ``enable_shrink``, else do nothing: calls of both modes may be in any order."""
        self._complete(lambda: None)

    def low_latency_update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> None:
        """Mask a rank, or take it in again: a collective of the ranks that are left.

        A rank that was masked asks to come back by ``mask=False`` for itself, and waits until the others take it in.
        They do so if it has asked, else it stays masked. Raises ``NotImplementedError`` for ``mask=True`` without
        ``enable_shrink``.
        """
        check_integer("rank_to_mask", rank_to_mask, least=0, most=self._num_ranks - 1)
        if self._masked and mask:
            self._masked.mask(rank_to_mask)
        elif self._masked:
            self._masked.unmask(rank_to_mask)
        elif mask:
            self._refuse(f"communication without rank {rank_to_mask} unless it is made with enable_shrink=True")

    def low_latency_query_mask_buffer(self, mask_status: torch.Tensor) -> None:
        """Write 1 for each rank that is masked and 0 for the others into int32 (R,)."""
        require_shape("mask_status", mask_status, self._num_ranks)
        mask_status.zero_()
        for rank in self._masked.masked if self._masked else ():
            mask_status[rank] = 1

    def low_latency_clean_mask_buffer(self) -> None:
        """Take in all masked ranks that have asked to come back, as ``low_latency_update_mask_buffer``."""
        if self._masked:
            self._masked.unmask()

    @torch.no_grad()
    def low_latency_dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: torch.Tensor | None = None,
        dispatch_wait_recv_cost_stats: torch.Tensor | None = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        *,
        topk_weights: torch.Tensor | None = None,
        use_nvfp4: bool = False,
        use_ue8m0_for_sf: bool = False,
        x_global_scale: torch.Tensor | None = None,
    ) -> tuple[Any, ...]:
        """Send tokens to their experts, without a wait of the host.

        Args:
            x: bfloat16 (num_tokens, H), at most T of them.
            topk_idx: int64 (num_tokens, num_topk), -1 for no expert.
            num_max_dispatch_tokens_per_rank: T, the same on all ranks.
            num_experts: E.
            cumulative_local_expert_recv_stats: int32 (E / R,), to which rows are added.
            dispatch_wait_recv_cost_stats: int64 (R,), to which the nanoseconds are added that each rank has come later
                than this one (DeepEP counts cycles); on all ranks or on none. The host waits then, and the first call
                of a buffer counts nothing without ``enable_shrink``.
            use_fp8: send rows as FP8 with a scale for each 128 columns, quantised where the token is.
            round_scale: scales are powers of two.
            use_ue8m0: with ``round_scale``, scales are their exponents, four in an int32.
            async_finish: return an event recorded after the call.
            return_recv_hook: rows and counts are there once the hook has been called.
            topk_weights: float32 (num_tokens, num_topk), which travel with the tokens; of branch hybrid-ep, as are
                those that follow. A combine gets its own.
            use_nvfp4: send rows times ``x_global_scale``, float32 of one element, as ``Quantize("nvfp4")``; with
                ``use_fp8=False``. ``use_ue8m0_for_sf`` is refused.

        Returns:
            Rows (E / R, R * T, H), or float8_e4m3fn rows and their scales, float32 (E / R, R * T, H / 128) or packed
            int32 (E / R, R * T, H / 512), column-major; of NVFP4 uint8 (R * T, H / 2, E / R) and float8_e4m3fn (32, 4,
            ceil(R * T / 128), 4, ceil(H / 64), E / R), views of swizzled scales; those behind an expert's last row are
            undefined. Rows of each local expert, int32 (E / R,); with ``topk_weights`` the weight of each row, float32
            (E / R, R * T), and the rank that it came from, int32; the handle; the event; the hook or ``None``.
        """
        with self._low_latency.rejecting():
            require_shape("dispatch_wait_recv_cost_stats", dispatch_wait_recv_cost_stats, self._num_ranks)
            launch = _launch(x.device, async_finish, return_recv_hook)
            num_max = num_max_dispatch_tokens_per_rank
            check_integer("num_max_dispatch_tokens_per_rank", num_max, least=1)
            if x.ndim != 2 or len(x) > num_max:
                raise ValueError(f"x has shape {tuple(x.shape)}, but this call needs at most ({num_max}, hidden)")
            if num_experts % self._num_ranks:
                raise ValueError(f"{num_experts} experts do not divide among {self._num_ranks} ranks")
            stats, num_local = cumulative_local_expert_recv_stats, num_experts // self._num_ranks
            require_shape("cumulative_local_expert_recv_stats", stats, num_local)
            require_shape("topk_weights", topk_weights, *topk_idx.shape)
            weights = None if topk_weights is None else topk_weights.float().contiguous()
            rows, quantize = x.contiguous(), fp8_format(round_scale, use_ue8m0) if use_fp8 else None
            if use_nvfp4:
                rows, quantize = nvfp4_rows(rows, x_global_scale, use_fp8, use_ue8m0_for_sf)
            num_received = torch.empty(num_local, dtype=torch.int32, device=x.device)
        self._add_waits("low-latency dispatch", dispatch_wait_recv_cost_stats)
        options = {"quantize": quantize, "launch": launch}
        sent = self._complete(lambda: self._send(rows, topk_idx, num_experts, num_max, weights, **options))
        handle = LowLatencyHandle(sent, num_max, x.shape[1], may_outlive_plan=self._masked is not None)
        of_rows: tuple[torch.Tensor, ...] = ()
        if weights is not None:
            assert sent.dispatched.weights is not None
            src_ranks = torch.empty(sent.handle.rows_shape, dtype=torch.int32, device=x.device)
            of_rows = sent.dispatched.weights, src_ranks

        def receive() -> None:
            sent.dispatched.wait()
            num_received.copy_(sent.dispatched.num_rows_per_expert)
            if stats is not None:
                stats.add_(num_received)
            if of_rows:
                of_rows[1].copy_(handle.source_ranks)

        arrived = as_deep_ep_returns(sent.dispatched.payloads, quantize)
        return arrived, num_received, *of_rows, handle, *_finish(receive, async_finish, return_recv_hook)

    @torch.no_grad()
    def low_latency_combine(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        handle: LowLatencyHandle,
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: torch.Tensor | None = None,
        combine_wait_recv_cost_stats: torch.Tensor | None = None,
        overlap: bool = False,
        **signals: Any,
    ) -> tuple[torch.Tensor, EventOverlap, Hook | None]:
        """Add up the rows of each token, times their weights, in float32.

        Args:
            x: bfloat16 (E / R, R * T, H), in the layout of the dispatch.
            topk_idx: of the dispatch.
            topk_weights: float32 (num_tokens, num_topk). They travel to the experts first, in a collective of their
                own: DeepEP's dispatch does not know them.
            handle: of the dispatch.
            use_logfmt: has no effect: sums are sent as they are, which is more exact.
            zero_copy: rows are in ``get_next_low_latency_combine_buffer``, not in ``x``.
            async_finish, return_recv_hook: as in the dispatch.
            out: bfloat16 (num_tokens, H), to write the sums to.
            combine_wait_recv_cost_stats: as ``dispatch_wait_recv_cost_stats``.
            overlap: of branch hybrid-ep, refused: rows are sent once all experts are done, whatever their ``signals``.

        Returns:
            Sums (num_tokens, H), in ``out`` if there is one; the event; the hook or ``None``.
        """
        with self._along(lambda: require_handle(handle, LowLatencyHandle).sent, comms=self._low_latency) as sent:
            if unknown := sorted(signals.keys() - _SIGNALS):
                raise TypeError(f"low_latency_combine has no argument {', '.join(unknown)}")
            if overlap:
                self._refuse("sums of rows whose experts have not finished (overlap=True)")
            require_shape("combine_wait_recv_cost_stats", combine_wait_recv_cost_stats, self._num_ranks)
            launch = _launch(x.device, async_finish, return_recv_hook)
            _require_ids(topk_idx, sent)
            require_shape("topk_weights", topk_weights, *topk_idx.shape)
            weights = topk_weights.float().contiguous()
            require_shape("out", out, sent.handle.num_tokens, handle.hidden)
            rows = self.get_next_low_latency_combine_buffer(handle) if zero_copy else x.contiguous()
        self._add_waits("low-latency combine", combine_wait_recv_cost_stats)

        def combine() -> torch.Tensor:
            if self._masked and handle.routing.topology is not self._masked.comm.topology:
                handle.renew(
                    self._send(x.new_empty(len(topk_idx), 1), topk_idx, sent.num_experts, handle.num_max_tokens)
                )
            handle.routing.replace_weights(weights)
            return handle.routing.combine([handle.ordered(rows)], launch, weights="topk")[0]

        sums = self._complete(combine)
        result = sums if out is None else out

        def receive() -> None:
            if launch.event is not None:
                launch.event.wait()
            if out is not None:
                out.copy_(sums)

        return result, *_finish(receive, async_finish, return_recv_hook)

    @property
    def _low_latency(self) -> GroupCommunicators:
        return self._masked or self._comms

    def _complete(self, call: Callable[[], _Result]) -> _Result:
        return self._masked.complete(call) if self._masked else call()

    def _add_waits(self, verb: str, stats: torch.Tensor | None) -> None:
        """Add how much later than this rank each other one has come to a call."""
        if stats is None or self._low_latency.current is None:
            return

        def measure() -> list[int]:
            assert self._low_latency.current is not None
            return waits_for_ranks(self._low_latency.current, verb, self._num_ranks, stats.device)

        stats.add_(torch.tensor(self._complete(measure), device=stats.device))

    def _send(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        num_experts: int,
        num_max: int,
        given: torch.Tensor | None = None,
        **options: Any,
    ) -> SentRows:
        """Send tokens (num_tokens, ...), at most ``num_max``, with weights or room for those that a combine brings."""
        shape, device = tuple(topk_idx.shape), x.device
        weights = given
        if weights is None:
            weights = self._kept.get(
                f"ones {shape}", device, lambda: torch.ones(shape, dtype=torch.float32, device=device)
            )
        return ExpertRows(self._low_latency, num_experts, num_max).dispatch(
            [x],
            topk_idx,
            weights,
            verb="low-latency dispatch",
            with_weights=given is not None,
            static=StaticRows(rows_per_expert=num_max * self._num_ranks),
            **options,
        )

    def get_next_low_latency_combine_buffer(self, handle: LowLatencyHandle) -> torch.Tensor:
        """Return memory for the rows of a combine with ``zero_copy``: bfloat16 (E / R, R * T, H).

        Calls of the same sizes get the same memory; in a CUDA graph it belongs to the graph.
        """
        sent = require_handle(handle, LowLatencyHandle).sent
        shape, device = (*sent.handle.rows_shape, handle.hidden), sent.dispatched.rows.device
        made = self._combine_buffers
        key = (shape, device, capture_number() if device.type == "cuda" else 0)
        if key not in made:
            made[key] = torch.empty(shape, dtype=torch.bfloat16, device=device)
        return made[key]


def _launch(device: torch.device, async_finish: bool, return_recv_hook: bool) -> Launch:
    """Return the launch of a call: on the communicator's stream if a hook waits for it."""
    if async_finish and return_recv_hook:
        raise ValueError(
            "async_finish and return_recv_hook exclude each other: an event, or a hook, waits for the call"
        )
    if not return_recv_hook or device.type != "cuda":
        return Launch()
    return Launch(own_stream=True, event=torch.cuda.Event())  # type: ignore[no-untyped-call]


def _finish(receive: Hook, async_finish: bool, return_recv_hook: bool) -> tuple[EventOverlap, Hook | None]:
    """Return the event and the hook of a call, which receives at once unless a hook does."""
    if not return_recv_hook:
        receive()
    return finished(async_finish), receive if return_recv_hook else None


def _require_ids(topk_idx: torch.Tensor, sent: SentRows) -> None:
    """Raise ``ValueError`` unless ids are the dispatch's; on CUDA, where the host would wait, their shape counts."""
    of_dispatch = sent.require_topk_idx()
    require_shape("topk_idx", topk_idx, *of_dispatch.shape)
    if topk_idx.device.type == "cpu" and topk_idx is not of_dispatch and not torch.equal(topk_idx, of_dispatch):
        raise ValueError("topk_idx differs from that of the dispatch, which the handle has")
