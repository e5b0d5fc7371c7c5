"""DeepEP's buffer (version 1, normal mode) on fusco: rows arrive by source rank, one for each token and rank.

Contract: DeepEP v1.2.1, ``deep_ep/buffer.py`` (MIT licence), and its callers in Megatron-core, NeMo Automodel, vLLM and
SGLang. Everything runs on the current stream: ``previous_event`` is waited for first, ``async_finish`` gives an event
recorded after the call, ``allocate_on_comm_stream`` has no effect. Of a ``config`` its ``num_sms`` counts. Everywhere
``topk_idx`` is int64 (num_tokens, num_topk), -1 for no expert, ``topk_weights`` float32 of that shape, and the number
of experts that of all ranks together. Nothing here has gradients: frameworks call it from their own autograd functions.
Other arguments that a docstring does not name are accepted and ignored: fusco has no such parts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

import torch
import torch.distributed as dist

from fusco.core.config import Launch
from fusco.core.integers import check_integer
from fusco.integrations.along_handles import biases_of, element_of
from fusco.integrations.checked_ids import num_topk_of
from fusco.integrations.events import EventHandle, EventOverlap, finished, wait_for
from fusco.integrations.growth import GrowingCommunicators
from fusco.integrations.rank_rows import RankRouting, RankRows, ranks_of

_UNSUPPORTED = (  # beginnings of names
    "low_latency_",
    "clean_low_latency_buffer",
    "get_next_low_latency_combine_buffer",
    "get_local_buffer_tensor",
)
_NO_BUFFER_BYTES = 1  # of size hints: callers make a new buffer if one wants more than theirs has
_Rows = torch.Tensor | tuple[torch.Tensor, ...]


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
        return _NO_BUFFER_BYTES

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Return the same for all sizes."""
        return _NO_BUFFER_BYTES


class Buffer:
    """Dispatch and combine among the ranks of a group, by the calls of DeepEP's normal mode.

    Attributes:
        num_sms: what ``set_num_sms`` was given, for callers that read it. Until then calls without a ``config`` take as
            many multiprocessors as fusco's do.
    """

    num_sms: ClassVar[int] = 20
    _budget: ClassVar[int | None] = None

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
    ) -> None:
        """Nothing is allocated before the first call, and then by the calls' own sizes.

        Args:
            group: ranks among which experts are distributed, in equal runs of consecutive experts; of any backend.
            num_nvl_bytes, num_rdma_bytes, explicitly_destroy: kept as attributes; ``destroy`` always works.
            low_latency_mode: must be false.
            comm: an MPI communicator; not supported.
        """
        if low_latency_mode:
            _refuse("low_latency_mode=True")
        if group is None or comm is not None:
            raise ValueError("fusco's Buffer needs a torch.distributed process group, and takes no MPI communicator")
        self.group, self.rank, self.group_size = group, dist.get_rank(group), dist.get_world_size(group)
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes
        self.low_latency_mode, self.explicitly_destroy = low_latency_mode, explicitly_destroy
        self._comms = GrowingCommunicators(group)
        self._rows = RankRows(group, self._comms)

    def destroy(self) -> None:
        """Release all resources without waiting for other ranks; the buffer cannot be used afterwards."""
        self._comms.abort()

    @staticmethod
    def is_sm90_compiled() -> bool:
        """Return true: FP8 rows are moved on every device."""
        return True

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        """Set the multiprocessors of calls without a ``config``; an even number."""
        if new_num_sms % 2:
            raise ValueError(f"the number of multiprocessors must be even, got {new_num_sms}")
        Buffer.num_sms = Buffer._budget = new_num_sms

    @staticmethod
    def capture() -> EventOverlap:
        """Return an event recorded on the current stream."""
        return EventOverlap(EventHandle())

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        """Return a configuration, the same for any number of ranks."""
        return Config(Buffer.num_sms)

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        """Return a configuration, the same for any number of ranks."""
        return Buffer.get_dispatch_config(num_ranks)

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
        of_experts = _count(topk_idx, num_experts)
        per_rank = is_token_in_rank.sum(0, dtype=torch.int32)
        return per_rank, None, of_experts, is_token_in_rank, finished(async_finish)

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
    ) -> tuple[_Rows, torch.Tensor | None, torch.Tensor | None, list[int], tuple[Any, ...] | None, EventOverlap]:
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
        payloads = list(x) if isinstance(x, tuple) else [x]
        if handle is not None:
            with self._comms.rejecting():
                known = _routing_of(handle)
            with known.rejecting():
                wait_for(previous_event)
                launch = self._launch(config)
                if topk_idx is not None or topk_weights is not None:
                    raise ValueError("a handle has its routing: topk_idx and topk_weights must be None with it")
                rows_of_tokens = [each.contiguous() for each in payloads]
            again, _ = known.dispatch_again(rows_of_tokens, None, launch)
            return again if isinstance(x, tuple) else again[0], None, None, [], None, finished(async_finish)
        with self._comms.rejecting():
            wait_for(previous_event)
            launch = self._launch(config)
            if is_token_in_rank is None or num_tokens_per_expert is None:
                raise ValueError("dispatch needs is_token_in_rank and num_tokens_per_expert, or a handle")
            check_integer("expert_alignment", expert_alignment, least=1)
            num_experts = len(num_tokens_per_expert)
            if num_experts % self.group_size:
                raise ValueError(
                    f"num_tokens_per_expert has {num_experts} experts, not as many on all {self.group_size} ranks"
                )
            routing, static = (topk_idx, topk_weights, num_experts), num_worst_tokens
        arrived, sent = self._rows.dispatch(payloads, is_token_in_rank, routing, num_static_rows=static, launch=launch)
        idx = weights = None
        if topk_idx is not None:
            idx = sent.local_idx()
            weights = sent.weights().clone(memory_format=torch.contiguous_format).masked_fill_(idx < 0, 0)
        counts = [] if num_worst_tokens else self._counts(sent, idx, num_tokens_per_expert, expert_alignment)
        rows = arrived if isinstance(x, tuple) else arrived[0]
        return rows, idx, weights, counts, (self._rows.prefix_matrix(sent), sent), finished(async_finish)

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
        with self._comms.rejecting():
            sent = _routing_of(handle)
        with sent.rejecting():
            wait_for(previous_event)
            launch = self._launch(config)
            parts = [x.contiguous()]
            if topk_weights is not None:
                parts.append(topk_weights.float().contiguous())
            biases = biases_of(bias, sent.handle.num_tokens, *x.shape[1:])
        return *sent.sums_of(parts, launch, biases), finished(async_finish)

    internode_dispatch, internode_combine = dispatch, combine

    def get_comm_stream(self) -> torch.cuda.Stream:
        """Return the current stream, on which everything runs."""
        return torch.cuda.current_stream()

    def __getattr__(self, name: str) -> Any:
        if name.startswith(_UNSUPPORTED):
            _refuse(name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @staticmethod
    def get_low_latency_rdma_size_hint(*_: Any) -> NoReturn:
        """Raise ``NotImplementedError``."""
        _refuse("get_low_latency_rdma_size_hint")

    def _launch(self, config: Config | None) -> Launch:
        return Launch(num_sms=config.num_sms if config else Buffer._budget)

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
            counts = _count(idx, num_local)
        return [-(-count // alignment) * alignment for count in counts.tolist()]


def _routing_of(handle: Any) -> RankRouting:
    return element_of(handle, 1, RankRouting, "dispatch of a Buffer")


def _count(idx: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Return how often each expert occurs, int32 (num_experts,); the host does not wait, as in ``torch.bincount``."""
    places = (idx + 1).clamp_(0, num_experts + 1).flatten()
    counts = idx.new_zeros(num_experts + 2, dtype=torch.int32)
    return counts.scatter_add_(0, places, torch.ones_like(places, dtype=torch.int32))[1:-1]


def _refuse(what: str) -> NoReturn:
    raise NotImplementedError(f"fusco's deep_ep has DeepEP's normal mode only, not {what}")
