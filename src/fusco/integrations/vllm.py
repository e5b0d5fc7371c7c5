"""vLLM: tokens of MoE layers move by fusco, in place of vLLM's own choice of what prepares and finalizes experts.

For vLLM 0.33 with data and expert parallelism: ``VLLM_PLUGINS=fusco`` loads it (see ``plugins``). With the all-to-all
backend ``allgather_reducescatter`` or ``deepep_high_throughput`` rows arrive by local expert in the standard format;
with ``deepep_low_latency`` in the batched one. Combine applies the weights. Decode steps have fixed sizes, so that CUDA
graphs have them. Sources of the interface: ``vllm/model_executor/layers/fused_moe/{modular_kernel,all2all_utils}.py``,
``vllm/v1/worker/ubatching.py`` and ``vllm/forward_context.py`` (Apache licence).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from types import ModuleType
from typing import Any, Literal

import torch
import torch.distributed as dist
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm.config import get_current_vllm_config
from vllm.distributed import get_ep_group
from vllm.forward_context import get_forward_context, is_forward_context_available
from vllm.model_executor.layers.fused_moe import all2all_utils
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import (
    TopKWeightAndReduceDelegate,
    TopKWeightAndReduceNoOP,
)
from vllm.v1.worker.ubatching import (
    dbo_current_ubatch_id,
    dbo_enabled,
    dbo_switch_to_compute_sync,
    dbo_yield_and_switch_from_compute_to_comm,
)

from fusco.core.config import RoutingSizes, StaticRows
from fusco.integrations.expert_rows import ExpertRows, SentRows
from fusco.integrations.placements import PlacementTable
from fusco.integrations.vllm_quantization import ArrivedRows, Quantization

_BATCHED = ("deepep_low_latency",)  # backends whose experts take the batched format
_STANDARD = ("allgather_reducescatter", "deepep_high_throughput")
# Rows, their scales, vLLM's metadata of experts, and for each row its expert and its weight.
_Prepared = tuple[torch.Tensor, torch.Tensor | None, Any, torch.Tensor | None, torch.Tensor | None]
_MAKER = "maybe_make_prepare_finalize"  # of vLLM, which chooses


class FuscoPrepareAndFinalize(mk.FusedMoEPrepareAndFinalizeModular):
    """Dispatch before the experts and combine after them, with rows in the standard format.

    A step of at most ``max_static_tokens`` on each rank has as many rows as any routing needs, so that the host does
    not wait and a CUDA graph can have it; in a larger one the host waits once, for the number of rows. Communication of
    one of two micro-batches overlaps with the experts of the other.
    """

    def __init__(
        self, group: dist.ProcessGroup, num_experts: int, *, max_static_tokens: int = 0, sp_size: int = 1
    ) -> None:
        """Nothing is allocated before the first call. The group, of any backend, has ``num_experts`` in all.

        Of a model with redundant experts these are the physical ones. ``sp_size`` ranks share the tokens of one of data
        parallelism.
        """
        super().__init__()
        self._group, self._num_ranks, self._num_experts = group, dist.get_world_size(group), num_experts
        if num_experts % self._num_ranks:
            raise ValueError(f"fusco needs equal numbers of experts, got {num_experts} on {self._num_ranks} ranks")
        self._max_static_tokens, self._sp_size = max_static_tokens, sp_size
        self._rows = ExpertRows.of_group(group, num_experts)
        self._table: PlacementTable | None = None
        self._sent: dict[int, SentRows] = {}  # by micro-batch

    @property
    def activation_format(self) -> Any:
        """Rows are (num_rows, hidden)."""
        return mk.FusedMoEActivationFormat.Standard

    def topk_indices_dtype(self) -> torch.dtype:
        """Return int64."""
        return torch.int64

    def max_num_tokens_per_rank(self) -> int | None:
        """Return ``None``: communicators grow."""
        return None

    def num_dispatchers(self) -> int:
        """Return the number of ranks."""
        return self._num_ranks

    def output_is_reduced(self) -> bool:
        """Return true: sums are those of all ranks."""
        return True

    def supports_dbo(self) -> bool:
        """Return true: calls hand themselves to the communication stream of two micro-batches."""
        return True

    def prepare(
        self,
        a1: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        num_experts: int,
        expert_map: torch.Tensor | None,
        apply_router_weight_on_input: bool,
        quant_config: Any,
        defer_input_quant: bool = False,
    ) -> _Prepared:
        """Send tokens ``a1`` (num_tokens, hidden) to their experts, quantised as ``quant_config`` says.

        Their weights are float32, their ids int64 (num_tokens, num_topk), -1 for no expert. ``expert_map`` is int32
        (num_experts,), the local index of each expert of all ranks, -1 for those of other ranks; any placement with
        equal numbers. ``apply_router_weight_on_input`` multiplies tokens by their weights, for one expert per token.
        ``defer_input_quant``: experts quantise themselves. With scales of blocks or of a token, rows travel quantised,
        with their scales; with one scale that all ranks compute from their tokens, they are quantised where they
        arrive.

        Returns rows (num_rows, hidden), of NVFP4 two values a byte; their scales or ``None``; the rows of each local
        expert; the expert of each row, int64 (num_rows, 1), another rank's for rows without a token; and its weight,
        float32 (num_rows, 1).
        """
        with self._rows.comms.rejecting():
            is_batched = self.max_num_tokens_per_rank() is not None
            quantization = Quantization.of(quant_config, is_deferred=defer_input_quant, is_batched=is_batched)
            if num_experts != self._num_experts:
                raise ValueError(f"num_experts={num_experts}, but the layer was made for {self._num_experts}")
            if apply_router_weight_on_input:
                if (num_topk := topk_ids.shape[1]) != 1:
                    raise ValueError(f"weights are applied to the input for one expert per token, got {num_topk}")
                a1 = a1 * topk_weights.to(a1.dtype)
            static = self._static_rows(len(a1), topk_ids.shape[1])
            payloads = quantization.before(a1)
        if self._table is None:
            self._table = PlacementTable.agree(self._group, num_experts, expert_map, a1.device)
        ids, weights = self._table.to_places(topk_ids), topk_weights.float()
        with _communicating():
            _use_here(*payloads, ids, weights)
            packing = quantization.values_per_element
            sent = self._rows.dispatch(payloads, ids, weights, static=static, values_per_element=packing)
        _use_here(*sent.dispatched.payloads, sent.dispatched.num_rows_per_expert, sent.dispatched.weights)
        self._sent[dbo_current_ubatch_id()] = sent
        return self._arrived(sent, quantization, static)

    def finalize(
        self,
        output: torch.Tensor,
        fused_expert_output: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: Any,
    ) -> None:
        """Write the sums of each token's rows, in the format of the experts, to ``output``, in place.

        Weights and ids are as ``prepare`` returned them. ``apply_router_weight_on_input``: weights are applied already;
        ``weight_and_reduce_impl`` says whether experts have applied them.
        """
        weights: Literal["topk"] | None = None
        with self._rows.comms.rejecting():
            sent = self._sent.pop(dbo_current_ubatch_id(), None)
            if sent is None:
                raise ValueError("finalize needs a prepare before it")
            rows = fused_expert_output
            if isinstance(weight_and_reduce_impl, TopKWeightAndReduceDelegate):
                weights = None if apply_router_weight_on_input else "topk"  # in the sums, in float32
            elif not isinstance(weight_and_reduce_impl, TopKWeightAndReduceNoOP) and rows.numel():
                rows = weight_and_reduce_impl.apply(
                    output=None,
                    fused_expert_output=rows,
                    topk_weights=topk_weights,
                    topk_ids=topk_ids,
                    apply_router_weight_on_input=apply_router_weight_on_input,
                )
            rows = rows.reshape(*sent.dispatched.rows.shape[:-1], output.shape[1])
        with _communicating():
            _use_here(rows)
            sums = sent.combine([rows], weights=weights)[0]
        _use_here(sums)
        output.copy_(sums)

    def _static_rows(self, num_tokens: int, num_topk: int) -> StaticRows | None:
        """Return the fixed size of this step, the same on all ranks; ``None`` for a step that is too large."""
        most = _most_tokens(num_tokens, self._sp_size)
        return StaticRows.for_rank_load(self._sizes(most, num_topk)) if most <= self._max_static_tokens else None

    def _sizes(self, num_tokens: int, num_topk: int) -> RoutingSizes:
        return RoutingSizes(
            max_tokens_per_rank=max(1, num_tokens),
            world_size=self._num_ranks,
            num_topk=num_topk,
            num_experts=self._num_experts,
        )

    def _arrived(self, sent: SentRows, quantization: Quantization, static: StaticRows | None) -> _Prepared:
        counts, table = sent.dispatched.num_rows_per_expert, self._table
        assert table is not None
        assert sent.dispatched.weights is not None
        ends, num_rows = counts.cumsum(0), len(sent.dispatched.rows)
        local = torch.searchsorted(ends, torch.arange(num_rows, device=ends.device), right=True)
        arrived = ArrivedRows(sent.dispatched.payloads, local < len(counts))
        rows, scales = quantization.after(arrived, len(counts))
        on_host = None if static else sent.counts_on_host.int()
        metadata = mk.ExpertTokensMetadata(counts.int(), on_host)
        return rows, scales, metadata, table.experts_here[local][:, None], sent.dispatched.weights[:, None]


class FuscoBatchedPrepareAndFinalize(FuscoPrepareAndFinalize):
    """The same with rows in the batched format: a place of each local expert for every token of all ranks.

    The host never waits, and a CUDA graph can have every call.
    """

    def __init__(self, group: dist.ProcessGroup, num_experts: int, *, max_tokens_per_rank: int) -> None:
        """Calls have at most ``max_tokens_per_rank`` tokens on each rank; other arguments as of the standard format."""
        super().__init__(group, num_experts)
        self._max_tokens_per_rank = max_tokens_per_rank

    @property
    def activation_format(self) -> Any:
        """Rows are (num_local_experts, places, hidden)."""
        return mk.FusedMoEActivationFormat.BatchedExperts

    def max_num_tokens_per_rank(self) -> int | None:
        """Return the largest number of tokens of a rank in a call."""
        return self._max_tokens_per_rank

    def _static_rows(self, num_tokens: int, num_topk: int) -> StaticRows:
        if num_tokens > self._max_tokens_per_rank:
            raise ValueError(f"{num_tokens} tokens, but the layer was made for {self._max_tokens_per_rank} on a rank")
        return StaticRows.for_expert_load(self._sizes(self._max_tokens_per_rank, num_topk))

    def _arrived(self, sent: SentRows, quantization: Quantization, static: StaticRows | None) -> _Prepared:
        """Return rows and counts; experts get no ids and weights of rows, as combine applies the weights."""
        counts = sent.dispatched.num_rows_per_expert
        places = torch.arange(sent.dispatched.rows.shape[1], device=counts.device)
        arrived = ArrivedRows(sent.dispatched.payloads, places < counts[:, None])
        rows, scales = quantization.after(arrived, len(counts))
        return rows, scales, mk.ExpertTokensMetadata(counts.int(), None), None, None


@contextmanager
def _communicating() -> Iterator[None]:
    """Run the block while the other of two micro-batches computes; the computing stream waits at its end.

    In a capture all work stays on its stream, as vLLM's own collectives do there: micro-batches follow each other.
    """
    if not dbo_enabled() or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
        yield
        return
    dbo_yield_and_switch_from_compute_to_comm()
    try:
        yield
    finally:
        dbo_switch_to_compute_sync()


def _use_here(*tensors: torch.Tensor | None) -> None:
    """Keep the memory of tensors of the other stream of two micro-batches until this stream has used them."""
    if dbo_enabled():
        for each in tensors:
            if each is not None and each.is_cuda:
                each.record_stream(torch.cuda.current_stream())


def _most_tokens(num_tokens: int, sp_size: int) -> int:
    """Return the largest number of tokens of any rank in this step, which vLLM has exchanged, or else this one's."""
    metadata = get_forward_context().dp_metadata if is_forward_context_available() else None
    return (
        num_tokens if metadata is None else max(num_tokens, -(-int(metadata.num_tokens_across_dp_cpu.max()) // sp_size))
    )


def _largest_graph() -> int:
    """Return the tokens of the largest step that vLLM captures in CUDA graphs; 0 without graphs."""
    config = get_current_vllm_config()
    sizes = config.compilation_config.cudagraph_capture_sizes
    return 0 if config.model_config.enforce_eager else max(sizes or [0])


def _choosing_fusco(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return what makes fusco's classes where experts are distributed, and otherwise what vLLM makes."""

    @wraps(original)
    def make(moe: Any, *arguments: Any, use_monolithic: bool = False, **options: Any) -> Any:
        backend = moe.moe_parallel_config.all2all_backend
        if not moe.moe_parallel_config.use_all2all_kernels or backend not in (*_STANDARD, *_BATCHED):
            return original(moe, *arguments, use_monolithic=use_monolithic, **options)
        if use_monolithic:
            raise ValueError(
                "fusco moves rows to experts that take rows, and these take tokens and router logits: choose "
                "--moe-backend triton or deep_gemm with fusco"
            )
        group, sp_size = get_ep_group().cpu_group, moe.moe_parallel_config.sp_size
        if backend in _BATCHED:
            return FuscoBatchedPrepareAndFinalize(group, moe.num_experts, max_tokens_per_rank=moe.max_num_tokens)
        return FuscoPrepareAndFinalize(group, moe.num_experts, max_static_tokens=_largest_graph(), sp_size=sp_size)

    return make


@cache
def register() -> None:
    """Make vLLM use fusco's classes in this process; a second call does nothing.

    vLLM has no registry for them (its pull request 50556 proposes one), so this replaces the function that makes them,
    in its module and in those that have imported it.
    """
    original = getattr(all2all_utils, _MAKER)
    replacement = _choosing_fusco(original)
    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType) and vars(module).get(_MAKER) is original:
            setattr(module, _MAKER, replacement)
