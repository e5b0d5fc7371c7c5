"""The low-latency mode of DeepEP's first version on fusco: masked rows of fixed size, for decode in CUDA graphs.

Contract: DeepEP v1.2.1, ``deep_ep/buffer.py``, and main at dd758ca, ``deep_ep/buffers/legacy.py`` (MIT licence), and
their callers in vLLM and SGLang. E experts of all ranks together, R ranks, at most T tokens of a rank, H hidden: rows
are (E / R, R * T, H), those of an expert in order of source rank, then token, with counts beside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any, overload

import torch
import torch.distributed as dist

from fusco.core.config import Launch, StaticRows
from fusco.core.integers import check_integer
from fusco.core.quantization import Quantize
from fusco.cuda.within_node.device_plan import capture_number
from fusco.integrations.along_handles import require_handle, require_shape
from fusco.integrations.deep_ep.base import SIZE_HINT, BufferBase, Rows
from fusco.integrations.deep_ep.events import EventOverlap, finished
from fusco.integrations.expert_rows import ExpertRows, SentRows
from fusco.integrations.kept_tensors import KeptTensors

Hook = Callable[[], None]
_BITS_OF_COUNT = 32  # of an element of ``LowLatencyHandle.layout_range``


class LowLatencyHandle(Sequence[Any]):
    """The handle of a low-latency dispatch: in DeepEP a tuple of five, whose tensors are computed when first read.

    Elements are ``src_info``, ``layout_range``, T, H and E.
    """

    def __init__(self, sent: SentRows, num_max_tokens: int, hidden: int) -> None:
        self.sent, self.num_max_tokens, self.hidden = sent, num_max_tokens, hidden

    @cached_property
    def src_info(self) -> torch.Tensor:
        """The token of each row, int32 (E / R, R * T), undefined behind an expert's last row.

        Tokens of another node's ranks are counted without those that no rank of this node has an expert for.
        """
        return self._sources[..., 1].int()

    @cached_property
    def layout_range(self) -> torch.Tensor:
        """First row and number of rows from each rank, int64 (E / R, R): the first in the upper 32 bits."""
        counts, num_ranks = self.sent.dispatched.num_rows_per_expert, self.sent.comm.placement.world_size
        num_local, num_rows = self._sources.shape[:2]
        is_row = torch.arange(num_rows, device=counts.device) < counts[:, None]
        src = torch.where(is_row, self._sources[..., 0], num_ranks)
        from_ranks = counts.new_zeros(num_local, num_ranks + 1).scatter_add_(1, src, torch.ones_like(src))[:, :-1]
        return ((from_ranks.cumsum(1) - from_ranks) << _BITS_OF_COUNT) | from_ranks

    @cached_property
    def _sources(self) -> torch.Tensor:
        return self.sent.handle.plan.slot_to_source.view(*self.sent.handle.rows_shape, 2)

    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Iterator[Any]:
        return (self[place] for place in range(len(self)))

    @overload
    def __getitem__(self, place: int) -> Any: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[Any]: ...
    def __getitem__(self, place: int | slice) -> Any:
        if isinstance(place, slice):
            return [self[each] for each in range(*place.indices(len(self)))]
        if not -len(self) <= place < len(self):
            raise IndexError(f"a handle has {len(self)} elements, got {place}")
        if place % len(self) == 0:
            return self.src_info
        if place % len(self) == 1:
            return self.layout_range
        return (self.num_max_tokens, self.hidden, self.sent.num_experts)[place % len(self) - 2]


class LowLatencyCalls(BufferBase):
    """The calls of the low-latency mode.

    With ``return_recv_hook`` a call runs on the communicator's stream, and its hook makes the current stream wait: what
    the caller launches between the two overlaps. fusco's kernels wait for peers themselves, so they take SMs in the
    meantime, unlike DeepEP's. On the CPU, and without a hook, a call is complete when it returns.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self._kept = KeptTensors()
        self._combine_buffers: dict[Any, torch.Tensor] = {}  # by shape, device and capture of a graph

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        """Return the same for all sizes: fusco allocates by the calls' own sizes."""
        return SIZE_HINT

    def clean_low_latency_buffer(self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int) -> None:
        """Do nothing: calls of both modes may follow each other in any order."""

    def low_latency_update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> None:
        """Raise ``NotImplementedError`` unless the rank takes part already: no rank can be left out."""
        check_integer("rank_to_mask", rank_to_mask, least=0, most=self._num_ranks - 1)
        if mask:
            self._refuse(f"communication without rank {rank_to_mask}")

    def low_latency_query_mask_buffer(self, mask_status: torch.Tensor) -> None:
        """Write zeros into int32 (R,): all ranks take part."""
        require_shape("mask_status", mask_status, self._num_ranks)
        mask_status.zero_()

    def low_latency_clean_mask_buffer(self) -> None:
        """Do nothing: all ranks take part."""

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
    ) -> tuple[Rows, torch.Tensor, LowLatencyHandle, EventOverlap, Hook | None]:
        """Send tokens to their experts, without a wait of the host.

        Args:
            x: bfloat16 (num_tokens, H), at most T of them.
            topk_idx: int64 (num_tokens, num_topk), -1 for no expert.
            num_max_dispatch_tokens_per_rank: T, the same on all ranks.
            num_experts: E.
            cumulative_local_expert_recv_stats: int32 (E / R,), to which rows are added.
            dispatch_wait_recv_cost_stats: must be ``None``: waits are not measured by rank.
            use_fp8: send rows as FP8 with a scale for each 128 columns, quantised where the token is.
            round_scale: scales are powers of two.
            use_ue8m0: with ``round_scale``, scales are their exponents, four in an int32.
            async_finish: return an event recorded after the call.
            return_recv_hook: rows and counts are there once the hook has been called.

        Returns:
            Rows (E / R, R * T, H), or float8_e4m3fn rows and their scales, float32 (E / R, R * T, H / 128) or packed
            int32 (E / R, R * T, H / 512), column-major; those behind an expert's last row are undefined. Rows of each
            local expert, int32 (E / R,); the handle; the event; the hook or ``None``.
        """
        with self._comms.rejecting():
            if dispatch_wait_recv_cost_stats is not None:
                self._refuse("dispatch_wait_recv_cost_stats")
            launch = _launch(x.device, async_finish, return_recv_hook)
            num_max = num_max_dispatch_tokens_per_rank
            check_integer("num_max_dispatch_tokens_per_rank", num_max, least=1)
            if x.ndim != 2 or len(x) > num_max:
                raise ValueError(f"x has shape {tuple(x.shape)}, but this call needs at most ({num_max}, hidden)")
            if num_experts % self._num_ranks:
                raise ValueError(f"{num_experts} experts do not divide among {self._num_ranks} ranks")
            stats, num_local = cumulative_local_expert_recv_stats, num_experts // self._num_ranks
            require_shape("cumulative_local_expert_recv_stats", stats, num_local)
            quantize = _quantize(round_scale, use_ue8m0) if use_fp8 else None
            # Room for the weights of a combine, which come with it.
            shape = tuple(topk_idx.shape)
            weights = self._kept.get(
                f"ones {shape}", x.device, lambda: torch.ones(shape, dtype=torch.float32, device=x.device)
            )
            num_received = torch.empty(num_local, dtype=torch.int32, device=x.device)
            static = StaticRows(rows_per_expert=num_max * self._num_ranks)
        sent = ExpertRows(self._comms, num_experts, num_max).dispatch(
            [x.contiguous()],
            topk_idx,
            weights,
            verb="low-latency dispatch",
            with_weights=False,
            static=static,
            quantize=quantize,
            launch=launch,
        )

        def receive() -> None:
            sent.dispatched.wait()
            num_received.copy_(sent.dispatched.num_rows_per_expert)
            if stats is not None:
                stats.add_(num_received)

        rows = sent.dispatched.payloads if use_fp8 else sent.dispatched.rows
        handle = LowLatencyHandle(sent, num_max, x.shape[1])
        return rows, num_received, handle, *_finish(receive, async_finish, return_recv_hook)

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
            combine_wait_recv_cost_stats: must be ``None``.

        Returns:
            Sums (num_tokens, H), in ``out`` if there is one; the event; the hook or ``None``.
        """
        with self._along(lambda: require_handle(handle, LowLatencyHandle).sent) as sent:
            if combine_wait_recv_cost_stats is not None:
                self._refuse("combine_wait_recv_cost_stats")
            launch = _launch(x.device, async_finish, return_recv_hook)
            _require_ids(topk_idx, sent)
            require_shape("topk_weights", topk_weights, *topk_idx.shape)
            weights = topk_weights.float().contiguous()
            require_shape("out", out, sent.handle.num_tokens, handle.hidden)
            rows = self.get_next_low_latency_combine_buffer(handle) if zero_copy else x.contiguous()
        sent.replace_weights(weights)
        (sums,) = sent.combine([rows], launch, weights="topk")
        result = sums if out is None else out

        def receive() -> None:
            if launch.event is not None:
                launch.event.wait()
            if out is not None:
                out.copy_(sums)

        return result, *_finish(receive, async_finish, return_recv_hook)

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


def _quantize(round_scale: bool, use_ue8m0: bool) -> Quantize:
    if use_ue8m0 and not round_scale:
        raise ValueError("use_ue8m0=True needs round_scale=True: exponents are those of powers of two")
    return Quantize(scale="ue8m0" if use_ue8m0 else "power-of-two" if round_scale else "float32", layout="tma")


def _require_ids(topk_idx: torch.Tensor, sent: SentRows) -> None:
    """Raise ``ValueError`` unless ids are the dispatch's; on CUDA, where the host would wait, their shape counts."""
    of_dispatch = sent.require_topk_idx()
    require_shape("topk_idx", topk_idx, *of_dispatch.shape)
    if topk_idx.device.type == "cpu" and topk_idx is not of_dispatch and not torch.equal(topk_idx, of_dispatch):
        raise ValueError("topk_idx differs from that of the dispatch, which the handle has")
