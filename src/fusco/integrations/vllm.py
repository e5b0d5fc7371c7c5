"""vLLM: the tokens of unquantised experts move by fusco, through vLLM's registry of custom operations.

For vLLM 0.33 with data and expert parallelism: ``VLLM_PLUGINS=fusco`` loads it (see ``plugins``). Rows arrive by local
expert, as of vLLM's own prefill with DeepEP version 2, and combine applies the weights. Sources of the interface:
``vllm/model_executor/layers/fused_moe/{modular_kernel,unquantized_fused_moe_method}.py`` and
``vllm/model_executor/custom_op.py`` (Apache licence).
"""

from __future__ import annotations

from functools import cache
from typing import Any, Literal

import torch
import torch.distributed as dist
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm.distributed import get_ep_group
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import (
    TopKWeightAndReduceDelegate,
    TopKWeightAndReduceNoOP,
)
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

from fusco.integrations.expert_rows import ExpertRows, SentRows


class FuscoPrepareAndFinalize(mk.FusedMoEPrepareAndFinalizeModular):
    """Dispatch before the experts and combine after them; the host waits once in a dispatch."""

    def __init__(self, group: dist.ProcessGroup, num_experts: int) -> None:
        """Nothing is allocated before the first call. The group, of any backend, has ``num_experts`` in all."""
        super().__init__()
        self._num_ranks, self._num_experts = dist.get_world_size(group), num_experts
        if num_experts % self._num_ranks:
            raise ValueError(f"fusco needs equal numbers of experts, got {num_experts} on {self._num_ranks} ranks")
        num_local = num_experts // self._num_ranks
        first = dist.get_rank(group) * num_local
        self._local_experts = range(first, first + num_local)
        self._rows = ExpertRows.of_group(group, num_experts)
        self._sent: SentRows | None = None
        self._has_checked_map = False

    @property
    def activation_format(self) -> Any:
        """Rows are (num_rows, hidden)."""
        return mk.FusedMoEActivationFormat.Standard

    def topk_indices_dtype(self) -> torch.dtype:
        """Return int64."""
        return torch.int64

    def max_num_tokens_per_rank(self) -> None:
        """Return ``None``: communicators grow."""

    def num_dispatchers(self) -> int:
        """Return the number of ranks."""
        return self._num_ranks

    def output_is_reduced(self) -> bool:
        """Return true: sums are those of all ranks."""
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
        defer_input_quant: bool,
    ) -> tuple[torch.Tensor, None, Any, torch.Tensor, torch.Tensor]:
        """Send tokens ``a1`` (num_tokens, hidden) to their experts.

        Their weights are float32, their ids int64 (num_tokens, num_topk), -1 for no expert. ``expert_map`` is int32
        (num_experts,), the local index of each expert of all ranks, -1 for those of other ranks.
        ``apply_router_weight_on_input`` multiplies tokens by their weights, for one expert per token. ``quant_config``
        must not quantise activations, unless ``defer_input_quant``: experts quantise themselves.

        Returns rows (num_rows, hidden); ``None``; the rows of each local expert; the expert of each row, int64
        (num_rows, 1); and its weight, float32 (num_rows, 1).
        """
        with self._rows.comms.rejecting():
            if quant_config.quant_dtype is not None and not defer_input_quant:
                dtype = quant_config.quant_dtype
                raise NotImplementedError(f"fusco's vLLM adapter is for unquantised rows, not {dtype}")
            if num_experts != self._num_experts:
                raise ValueError(f"num_experts={num_experts}, but the layer was made for {self._num_experts}")
            self._check_map(expert_map)
            if apply_router_weight_on_input:
                if (num_topk := topk_ids.shape[1]) != 1:
                    raise ValueError(f"weights are applied to the input for one expert per token, got {num_topk}")
                a1 = a1 * topk_weights.to(a1.dtype)
            a1, weights_of_tokens = a1.contiguous(), topk_weights.float()
        sent = self._sent = self._rows.dispatch([a1], topk_ids, weights_of_tokens)
        rows, weights, counts = sent.dispatched.rows, sent.dispatched.weights, sent.dispatched.num_rows_per_expert
        assert weights is not None
        experts = torch.arange(self._local_experts.start, self._local_experts.stop, device=rows.device)
        ids = torch.repeat_interleave(experts, counts, output_size=len(rows))
        metadata = mk.ExpertTokensMetadata(counts.int(), sent.counts_on_host.int())
        return rows, None, metadata, ids[:, None], weights[:, None]

    def finalize(
        self,
        output: torch.Tensor,
        fused_expert_output: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: Any,
    ) -> None:
        """Write the sums of each token's rows (num_rows, hidden) or (num_rows, 1, hidden) to ``output``, in place.

        Weights and ids are as ``prepare`` returned them. ``apply_router_weight_on_input``: weights are applied already;
        ``weight_and_reduce_impl`` says whether experts have applied them.
        """
        weights: Literal["topk"] | None = None
        with self._rows.comms.rejecting():
            if self._sent is None:
                raise ValueError("finalize needs a prepare before it")
            sent, self._sent = self._sent, None
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
            rows = rows.reshape(len(topk_ids), output.shape[1])
        output.copy_(sent.combine([rows], weights=weights)[0])

    def _check_map(self, expert_map: torch.Tensor | None) -> None:
        """Raise unless this rank has a run of consecutive experts; the host waits, in the first call only."""
        if self._has_checked_map or expert_map is None:
            return
        here = expert_map[self._local_experts.start : self._local_experts.stop].tolist()
        if here != list(range(len(self._local_experts))):
            raise ValueError(
                f"fusco needs runs of consecutive experts (expert_placement_strategy='linear'): of experts "
                f"{self._local_experts.start} to {self._local_experts.stop - 1} this rank has {here}"
            )
        self._has_checked_map = True


class FuscoMoEMethod(UnquantizedFusedMoEMethod):
    """vLLM's method of unquantised experts, which moves tokens by fusco where experts are distributed."""

    def _init_moe_kernel(self, layer: Any) -> None:
        if not self.moe.moe_parallel_config.use_all2all_kernels:
            super()._init_moe_kernel(layer)
            return
        takes_rows = self.experts_cls.activation_format() == mk.FusedMoEActivationFormat.Standard
        if self.experts_cls.is_monolithic() or not takes_rows:
            raise ValueError(
                f"{self.experts_cls.__name__} does not take rows (num_rows, hidden) and their experts: choose "
                f"--all2all-backend allgather_reducescatter and --moe-backend triton with fusco"
            )
        self.moe_quant_config = self.get_fused_moe_quant_config(layer)
        prepare_and_finalize = FuscoPrepareAndFinalize(get_ep_group().cpu_group, self.moe.num_experts)
        experts = self.experts_cls(moe_config=self.moe, quant_config=self.moe_quant_config)
        self.moe_kernel = mk.FusedMoEKernel(prepare_and_finalize, experts)


@cache
def register() -> None:
    """Make vLLM use ``FuscoMoEMethod`` in this process; a second call does nothing."""
    UnquantizedFusedMoEMethod.register_oot(FuscoMoEMethod)
