"""DeepEP's first version on fusco: rows arrive by source rank, one for each token and rank.

Its low-latency mode is in ``low_latency``.

Contract: DeepEP v1.2.1, ``deep_ep/buffer.py`` (MIT licence), and its callers in Megatron-core, NeMo Automodel, vLLM and
SGLang. ``allocate_on_comm_stream`` has no effect (see ``base``). Of a ``config`` its ``num_sms`` counts. Everywhere
``topk_idx`` is int64 (num_tokens, num_topk), -1 for no expert, ``topk_weights`` float32 of that shape, and the number
of experts that of all ranks together. Other arguments that a docstring does not name are accepted and ignored: fusco
has no such parts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from fusco.core.checked_ids import num_topk_of
from fusco.core.config import Launch
from fusco.core.integers import check_integer
from fusco.integrations.along_handles import element_of
from fusco.integrations.deep_ep.base import SIZE_HINT, Rows, like, payloads_of
from fusco.integrations.deep_ep.events import EventHandle, EventOverlap, finished, wait_for
from fusco.integrations.deep_ep.low_latency import LowLatencyCalls
from fusco.integrations.deep_ep.rank_rows import RankRouting, count_of_each, ranks_of


@dataclass(frozen=True)
class Config:
    """Tuning of DeepEP's kernels, accepted for ``num_sms``; fusco has no chunks."""

    num_sms: int = 20
    num_max_nvl_chunked_send_tokens: int = 6
    num_max_nvl_chunked_recv_tokens: int = 256
    num_max_rdma_chunked_send_tokens: int = 6
    num_max_rdma_chunked_recv_tokens: int = 256

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Return the same for all sizes: fusco allocates by the calls' own sizes."""
        return SIZE_HINT

    get_rdma_buffer_size_hint = get_nvl_buffer_size_hint


class Buffer(LowLatencyCalls):
    """Dispatch and combine among the ranks of a group, by the calls of DeepEP's normal and low-latency modes.

    Attributes:
        num_sms: what ``set_num_sms`` was given, for callers that read it. Until then calls without a ``config`` take as
            many SMs as fusco's do.
    """

    num_sms: ClassVar[int] = 20
    _budget: ClassVar[int | None] = None
    _offered = "DeepEP's normal and low-latency modes"
    _refused = ("get_local_buffer_tensor", "dispatch_pcie", "combine_pcie")

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        explicitly_destroy: bool = False,
        comm: Any = None,
        use_fabric: bool = False,
        enable_shrink: bool = False,
        *,
        allow_nvlink_for_normal_mode: bool = True,
    ) -> None:
        """Nothing is allocated before the first call, and then by the calls' own sizes.

        Args:
            group: ranks among which experts are distributed, in equal runs of consecutive experts; of any backend.
            num_nvl_bytes, num_rdma_bytes, explicitly_destroy: kept as attributes; ``destroy`` always works.
            low_latency_mode: kept as an attribute: both modes always work.
            enable_shrink: let low-latency calls go on without ranks that fail; see ``LowLatencyCalls``.
            comm: an MPI communicator; not supported.
        """
        if group is None or comm is not None:
            raise ValueError("fusco's Buffer needs a torch.distributed process group, and takes no MPI communicator")
        super().__init__(group, is_masked=enable_shrink)
        self.rank, self.group_size = self._rank, self._num_ranks
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes
        self.low_latency_mode, self.explicitly_destroy = low_latency_mode, explicitly_destroy

    @staticmethod
    def is_sm90_compiled() -> bool:
        """Return true: FP8 rows are moved on every device."""
        return True

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        """Set the SMs of calls without a ``config``; an even number."""
        if new_num_sms % 2:
            raise ValueError(f"the number of SMs must be even, got {new_num_sms}")
        Buffer.num_sms = Buffer._budget = new_num_sms

    @staticmethod
    def capture() -> EventOverlap:
        """Return an event recorded on the current stream."""
        return EventOverlap(EventHandle())

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        """Return a configuration, the same for any number of ranks."""
        return Config(Buffer.num_sms)

    get_combine_config = get_dispatch_config

    def get_dispatch_layout(
        self,
        topk_idx: torch.Tensor,
        num_experts: int,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor, EventOverlap]:
        """Count tokens; of this rank alone, without communication.

        Returns tokens to each rank, int32 (num_ranks,); ``None``; tokens to each expert, int32 (num_experts,); which
        token goes to which rank, bool (num_tokens, num_ranks); the event.
        """
        wait_for(previous_event)
        num_topk_of(topk_idx, len(topk_idx))
        is_token_in_rank = ranks_of(topk_idx, num_experts, self.group_size).contiguous()
        per_rank = is_token_in_rank.sum(0, dtype=torch.int32)
        return per_rank, None, count_of_each(topk_idx, num_experts), is_token_in_rank, finished(async_finish)

    @torch.no_grad()
    def dispatch(
        self,
        x: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        handle: tuple[Any, ...] | None = None,
        num_tokens_per_rank: torch.Tensor | None = None,
        num_tokens_per_rdma_rank: torch.Tensor | None = None,
        is_token_in_rank: torch.Tensor | None = None,
        num_tokens_per_expert: torch.Tensor | None = None,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Rows, torch.Tensor | None, torch.Tensor | None, list[int], tuple[Any, ...] | None, EventOverlap]:
        """Send each token once to every rank that has an expert for it; rows arrive by source rank, then token.

        Args:
            x: (num_tokens, hidden), or FP8 rows and their float32 scales (num_tokens, hidden / 128) of any strides.
            handle: of an earlier dispatch: the same routing; indices and weights must be ``None``.
            is_token_in_rank: bool (num_tokens, num_ranks).
            num_tokens_per_expert: int32 (num_experts,) of this rank; its length is the number of experts.
            expert_alignment: counts of the returned list are rounded up to a multiple of this.
            num_worst_tokens: a fixed number of rows, without a wait of the host; then the list is empty and the indices
                behind the last row are -1.

        Returns:
            Rows (num_rows, hidden), or rows and scales; local experts, int64 (num_rows, num_topk), -1 for those of
            other ranks; their weights, float32, zero there; rows of each local expert, on the host; the handle, or
            ``None`` for a cached dispatch, with element 0 int32 (num_ranks, num_ranks) whose column of this rank has
            the cumulated rows of source ranks; the event.
        """
        num_sms = config.num_sms if config else Buffer._budget
        if handle is not None:

            def check(_: RankRouting) -> None:
                if topk_idx is not None or topk_weights is not None:
                    raise ValueError("a handle has its routing: topk_idx and topk_weights must be None with it")

            events = (previous_event,)
            _, again, _ = self._dispatch_again(
                lambda: _routing_of(handle), x, num_sms=num_sms, previous_events=events, check=check
            )
            return like(x, again), None, None, [], None, finished(async_finish)
        with self._comms.rejecting():
            wait_for(previous_event)
            launch = Launch(num_sms=num_sms)
            if is_token_in_rank is None or num_tokens_per_expert is None:
                raise ValueError("dispatch needs is_token_in_rank and num_tokens_per_expert, or a handle")
            check_integer("expert_alignment", expert_alignment, least=1)
            num_experts = len(num_tokens_per_expert)
            if num_experts % self.group_size:
                raise ValueError(
                    f"num_tokens_per_expert has {num_experts} experts, not as many on all {self.group_size} ranks"
                )
            payloads, routing = payloads_of(x), (topk_idx, topk_weights, num_experts)
        arrived, sent = self._by_rank.dispatch(
            payloads, is_token_in_rank, routing, num_static_rows=num_worst_tokens, launch=launch
        )
        idx, weights = sent.local_idx_and_weights() if topk_idx is not None else (None, None)
        counts = [] if num_worst_tokens else self._counts(sent, idx, num_tokens_per_expert, expert_alignment)
        return like(x, arrived), idx, weights, counts, (self._by_rank.prefix_matrix(sent), sent), finished(async_finish)

    @torch.no_grad()
    def combine(
        self,
        x: torch.Tensor,
        handle: tuple[Any, ...],
        topk_weights: torch.Tensor | None = None,
        bias: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap]:
        """Add up the rows of each token, one from each rank, without weights.

        Args:
            x: (num_rows, hidden) in the layout of the dispatch.
            handle: of the dispatch.
            topk_weights: float32 (num_rows, num_topk), added up for each token, too.
            bias: one or two tensors (num_tokens, hidden), added to the sums.

        Returns:
            Sums (num_tokens, hidden); of the weights, float32 (num_tokens, num_topk), or ``None``; the event.
        """
        num_sms, events = config.num_sms if config else Buffer._budget, (previous_event,)
        _, sums, weights = self._combine(
            lambda: _routing_of(handle), x, topk_weights, num_sms=num_sms, bias=bias, previous_events=events
        )
        return sums, weights, finished(async_finish)

    internode_dispatch, internode_combine = dispatch, combine

    def _counts(
        self, sent: RankRouting, idx: torch.Tensor | None, num_tokens_per_expert: torch.Tensor, alignment: int
    ) -> list[int]:
        """Return the rows of each local expert, rounded up; the host waits."""
        num_local = sent.num_experts // self.group_size
        if idx is None:  # other ranks' counts are all that says it
            with sent.rejecting():
                to_ranks = num_tokens_per_expert.view(self.group_size, num_local).contiguous()
            counts = sent.comm.all_to_all(None, to_ranks).sum(0)
        else:
            counts = count_of_each(idx, num_local)
        return [-(-count // alignment) * alignment for count in counts.tolist()]


def _routing_of(handle: Any) -> RankRouting:
    return element_of(handle, 1, RankRouting, "dispatch of a Buffer")
