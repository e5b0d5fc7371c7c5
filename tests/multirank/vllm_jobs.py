"""vLLM's own kernel on ranks, with the ``deep_ep`` module and with fusco's adapter; its experts are PyTorch's."""

# ruff: noqa: PLC0415  vLLM may not be installed

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from framework_jobs import (
    INNER,
    NUM_EXPERTS,
    NUM_TOPK,
    bf16_error,
    expert_weights,
    frameworks_on,
    inputs_of,
    router_weights,
    sums_of_experts,
)

BF16 = torch.bfloat16


def kernels(group: dist.ProcessGroup) -> dict[str, list[float]] | str:
    """Errors of vLLM's kernel in steps with and without rows, by what moves them; or what is missing to import it."""
    with frameworks_on("cpu"):
        try:
            import vllm.model_executor.layers.fused_moe.modular_kernel as mk
            from vllm.model_executor.layers.fused_moe.prepare_finalize.deepep_ht import DeepEPHTPrepareAndFinalize
            from vllm.v1.worker.workspace import init_workspace_manager
        except ModuleNotFoundError as missing:
            if str(missing.name).partition(".")[0] in ("deep_ep", "fusco"):
                raise
            return str(missing)
        import deep_ep

        from fusco.integrations.vllm import FuscoPrepareAndFinalize

        assert "fusco" in deep_ep.__version__
        init_workspace_manager(torch.device("cpu"))
        # The arguments of DeepEPHTAll2AllManager and maybe_make_prepare_finalize.
        buffer = deep_ep.Buffer(
            group=group,
            num_nvl_bytes=1 << 20,
            num_rdma_bytes=0,
            low_latency_mode=False,
            num_qps_per_rank=1,
            explicitly_destroy=True,
        )
        size, first = group.size(), NUM_EXPERTS // group.size() * group.rank()
        ways = (
            DeepEPHTPrepareAndFinalize(buffer, num_dispatchers=size, dp_size=size, rank_expert_offset=first),
            FuscoPrepareAndFinalize(group, NUM_EXPERTS),
        )
        no_cache = mock.patch.object(torch.accelerator, "empty_cache")
        with mock.patch.object(mk, "PIN_MEMORY", new=False), no_cache, torch.no_grad():
            errors = {type(way).__name__: [_step(mk, way, group, step) for step in range(3)] for way in ways}
        buffer.destroy()
        return errors


def _step(mk: Any, way: Any, group: dist.ProcessGroup, step: int) -> float:
    """One layer; in the last step all tokens are rank 0's, and go to experts of rank 0."""
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.config import FUSED_MOE_UNQUANTIZED_CONFIG

    num_local = NUM_EXPERTS // group.size()
    first = group.rank() * num_local
    x, router = inputs_of(group.rank(), min(step, 1))[0].to(BF16), router_weights()
    if step == 2:
        x = x[: len(x) if group.rank() == 0 else 0]
        x[:, 0], router[:num_local, 0] = 1, 100
    weights, ids = torch.softmax(x.float() @ router.T, -1).topk(NUM_TOPK)
    pairs = [tuple(each.to(BF16) for each in pair) for pair in expert_weights()]
    expert_map = torch.full((NUM_EXPERTS,), -1, dtype=torch.int32)
    expert_map[first : first + num_local] = torch.arange(num_local, dtype=torch.int32)
    plain = dict.fromkeys(
        ("swiglu_limit", "swiglu_alpha", "swiglu_beta", "activation_situ_beta", "activation_situ_linear_beta")
    )
    config = SimpleNamespace(moe_parallel_config=None, **plain)
    out = mk.FusedMoEKernel(way, _experts(mk)(config, FUSED_MOE_UNQUANTIZED_CONFIG)).apply(
        hidden_states=x,
        w1=torch.stack([pair[0] for pair in pairs[first : first + num_local]]),
        w2=torch.stack([pair[1] for pair in pairs[first : first + num_local]]),
        topk_weights=weights,
        topk_ids=ids,
        activation=MoEActivation.GELU_NO_MUL,
        global_num_experts=NUM_EXPERTS,
        expert_map=expert_map,
        apply_router_weight_on_input=False,
    )
    return bf16_error(out, x, router)


def _experts(mk: Any) -> type:
    """Experts that apply the weights and add up the results of each row, as vLLM's Triton experts do."""
    from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP

    class TorchExperts(mk.FusedMoEExpertsModular):
        @staticmethod
        def activation_format() -> Any:
            return mk.FusedMoEActivationFormat.Standard

        def finalize_weight_and_reduce_impl(self) -> Any:
            return TopKWeightAndReduceNoOP()

        def workspace_shapes(self, num_rows: int, _: int, hidden: int, *__: Any) -> tuple[tuple[int, ...], ...]:
            return (num_rows, INNER), (1,), (num_rows, hidden)

        def apply(self, output: torch.Tensor, hidden_states: torch.Tensor, **given: Any) -> None:
            local, metadata = given["expert_map"][given["topk_ids"]], given["expert_tokens_meta"]
            assert torch.bincount(local[local >= 0], minlength=len(given["w1"])).equal(metadata.expert_num_tokens_cpu)
            pairs = list(zip(given["w1"], given["w2"], strict=True))
            output.copy_(sums_of_experts(hidden_states, local, given["topk_weights"], pairs))

    # All that is abstract besides: what vLLM asks before it chooses experts.
    TorchExperts.__abstractmethods__ = frozenset()
    return TorchExperts
