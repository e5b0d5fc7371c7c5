"""vLLM's own kernel on ranks, with the ``deep_ep`` module and with fusco's adapter; its experts are PyTorch's."""

# ruff: noqa: PLC0415  vLLM may not be installed

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from framework_jobs import (
    HIDDEN,
    INNER,
    NUM_EXPERTS,
    NUM_TOPK,
    Experts,
    dequantized,
    frameworks_on,
    inputs_of,
    router_weights,
    sums_of_experts,
    what_is_missing,
    wide,
    wide_experts,
    with_gelu,
)
from frozen_vllm import moe_kernel_quantize_input

from comparison import largest_error

BF16, FP8, BLOCK = torch.bfloat16, torch.float8_e4m3fn, 128
WIDE = 2 * HIDDEN  # a block of FP8 values: rows here are twice those of the other frameworks
MAX_TOKENS = 64  # of a rank in the batched format


def kernels(group: dist.ProcessGroup) -> dict[str, list[float]] | str:
    """Errors of vLLM's kernel in steps with and without rows, by what moves them; or what is missing to import it."""
    with frameworks_on("cpu"):
        try:
            import vllm.model_executor.layers.fused_moe.modular_kernel as mk
            from vllm.v1.worker.workspace import init_workspace_manager
        except ModuleNotFoundError as missing:
            return what_is_missing(missing)
        from fusco.integrations import vllm as adapter

        init_workspace_manager(torch.device("cpu"))
        errors = {}
        with on_cpu(mk), torch.no_grad(), _deep_ep_ways(group) as ways:
            for name, of_dtypes in {**ways, **_own_ways(adapter, group)}.items():
                for dtype, way in zip(("bfloat16", "FP8"), of_dtypes, strict=True):
                    steps = [_step(mk, way, group, step, quantized=dtype == "FP8") for step in range(3)]
                    errors[f"{name}, {dtype}"] = steps
        return errors


@contextlib.contextmanager
def on_cpu(mk: Any) -> Iterator[None]:
    """Replace what vLLM has for GPUs only: pinned memory, and the kernel that quantises."""
    from vllm.model_executor.layers.fused_moe.prepare_finalize import deepep_ht, deepep_ll

    import fusco.integrations.vllm_quantization as ours

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(mk, "PIN_MEMORY", new=False))
        stack.enter_context(mock.patch.object(torch.accelerator, "empty_cache"))
        for module in (deepep_ht, deepep_ll, ours):
            stack.enter_context(mock.patch.object(module, "moe_kernel_quantize_input", _quantize))
        # Those that DeepEP's kernels are compiled for.
        stack.enter_context(mock.patch.object(deepep_ll.DeepEPLLPrepareAndFinalize, "SUPPORTED_HIDDEN_SIZES", [WIDE]))
        yield


def _quantize(
    x: torch.Tensor,
    scale: torch.Tensor | None,
    quant_dtype: torch.dtype | None,
    per_act_token_quant: bool = False,
    block_shape: list[int] | None = None,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    if quant_dtype is None:
        return x, None
    return moe_kernel_quantize_input(x, scale, quant_dtype, per_act_token_quant, block_shape, is_scale_swizzled=False)


@contextlib.contextmanager
def _deep_ep_ways(group: dist.ProcessGroup) -> Iterator[dict[str, list[Any]]]:
    """vLLM's classes of DeepEP on fusco's module for bfloat16 and for FP8, with the arguments of its managers."""
    import deep_ep
    from vllm.model_executor.layers.fused_moe.prepare_finalize.deepep_ht import DeepEPHTPrepareAndFinalize
    from vllm.model_executor.layers.fused_moe.prepare_finalize.deepep_ll import DeepEPLLPrepareAndFinalize

    assert "fusco" in deep_ep.__version__
    size, first = group.size(), NUM_EXPERTS // group.size() * group.rank()
    usual = {"group": group, "num_nvl_bytes": 1 << 20, "num_qps_per_rank": 1, "explicitly_destroy": True}
    normal = deep_ep.Buffer(num_rdma_bytes=0, low_latency_mode=False, **usual)
    num_bytes = deep_ep.Buffer.get_low_latency_rdma_size_hint(MAX_TOKENS, WIDE, size, NUM_EXPERTS)
    low_latency = deep_ep.Buffer(num_rdma_bytes=num_bytes, low_latency_mode=True, **usual)
    ht = DeepEPHTPrepareAndFinalize(normal, num_dispatchers=size, dp_size=size, rank_expert_offset=first)
    ll = [
        DeepEPLLPrepareAndFinalize(
            low_latency, max_tokens_per_rank=MAX_TOKENS, num_dispatchers=size, use_fp8_dispatch=is_fp8
        )
        for is_fp8 in (False, True)
    ]
    yield {"DeepEPHTPrepareAndFinalize": [ht, ht], "DeepEPLLPrepareAndFinalize": ll}
    for buffer in (normal, low_latency):
        buffer.destroy()


@contextlib.contextmanager
def registered(adapter: Any, group: dist.ProcessGroup) -> Iterator[None]:
    """Let vLLM's oracles ask fusco what prepares experts of a group."""
    adapter.register()
    config = SimpleNamespace(
        compilation_config=SimpleNamespace(cudagraph_capture_sizes=[1, 2, 16]),
        model_config=SimpleNamespace(enforce_eager=False),
    )
    with (
        mock.patch.object(adapter, "get_ep_group", return_value=SimpleNamespace(cpu_group=group)),
        mock.patch.object(adapter, "get_current_vllm_config", return_value=config),
    ):
        yield


def _own_ways(adapter: Any, group: dist.ProcessGroup) -> dict[str, list[Any]]:
    """What vLLM's oracles make once fusco is registered, by backend."""
    from vllm.model_executor.layers.fused_moe.oracle import fp8

    made = {}
    with registered(adapter, group):
        for backend in ("allgather_reducescatter", "deepep_low_latency"):
            parallel = SimpleNamespace(use_all2all_kernels=True, all2all_backend=backend, sp_size=1)
            moe = SimpleNamespace(moe_parallel_config=parallel, num_experts=NUM_EXPERTS, max_num_tokens=MAX_TOKENS)
            way = fp8.maybe_make_prepare_finalize(moe, None, allow_new_interface=True)
            made[type(way).__name__] = [way, way]
    return made


def _step(mk: Any, way: Any, group: dist.ProcessGroup, step: int, *, quantized: bool) -> float:
    """One layer; in the last step all tokens are rank 0's, and go to experts of rank 0."""
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.config import FusedMoEQuantConfig

    num_local = NUM_EXPERTS // group.size()
    first = group.rank() * num_local
    x, router = inputs_of(group.rank(), min(step, 1))[0].to(BF16), router_weights()
    if step == 2:
        x = x[: len(x) if group.rank() == 0 else 0]
        x[:, 0], router[:num_local, 0] = 1, 100
    weights, ids = torch.softmax(x.float() @ router.T, -1).topk(NUM_TOPK)
    x, pairs = wide(x), wide_experts()
    expert_map = torch.full((NUM_EXPERTS,), -1, dtype=torch.int32)
    expert_map[first : first + num_local] = torch.arange(num_local, dtype=torch.int32)
    plain = dict.fromkeys(
        ("swiglu_limit", "swiglu_alpha", "swiglu_beta", "activation_situ_beta", "activation_situ_linear_beta")
    )
    quant_config = FusedMoEQuantConfig.make(
        *([FP8] if quantized else []), block_shape=[BLOCK, BLOCK] if quantized else None
    )
    config = SimpleNamespace(moe_parallel_config=None, **plain)
    is_batched = way.activation_format == mk.FusedMoEActivationFormat.BatchedExperts
    sizes = {"max_num_tokens": MAX_TOKENS, "num_dispatchers": way.num_dispatchers()} if is_batched else {}
    experts = experts_class(mk, is_batched=is_batched)(config, quant_config, **sizes)
    out = mk.FusedMoEKernel(way, experts).apply(
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
    if quantized:
        x = dequantized(*_quantize(x, None, FP8, per_act_token_quant=False, block_shape=[BLOCK, BLOCK]))
    expected = sums_of_experts(x.float(), ids, weights, [(up.float(), down.float()) for up, down in pairs])
    assert (out.shape, out.dtype) == (expected.shape, BF16)
    return largest_error(out, expected) / float(expected.abs().max()) if len(x) else 0.0


def _as_they_are(_: Any, w1: torch.Tensor, w2: torch.Tensor) -> Experts:
    return list(zip(w1, w2, strict=True))


def experts_class(
    mk: Any,
    *,
    is_batched: bool,
    matrices_of: Callable[[Any, torch.Tensor, torch.Tensor], Experts] = _as_they_are,
    of_expert: Callable[..., torch.Tensor] = with_gelu,
) -> Any:
    """Experts of a format, in PyTorch: vLLM's own need compiled parts.

    ``matrices_of`` gets vLLM's configuration of quantised weights, and the weights.
    """
    from vllm.model_executor.layers.fused_moe import topk_weight_and_reduce as reduction

    class StandardExperts(mk.FusedMoEExpertsModular):
        """Apply the weights and add up the results of each row, as vLLM's Triton experts do."""

        @staticmethod
        def activation_format() -> Any:
            return mk.FusedMoEActivationFormat.Standard

        def finalize_weight_and_reduce_impl(self) -> Any:
            return reduction.TopKWeightAndReduceNoOP()

        def workspace_shapes(self, num_rows: int, _: int, hidden: int, *__: Any) -> tuple[tuple[int, ...], ...]:
            return (num_rows, INNER), (1,), (num_rows, hidden)

        def apply(self, output: torch.Tensor, hidden_states: torch.Tensor, **given: Any) -> None:
            local, metadata = given["expert_map"][given["topk_ids"]], given["expert_tokens_meta"]
            counts = torch.bincount(local[local >= 0], minlength=len(given["w1"]))
            assert counts.equal(metadata.expert_num_tokens)
            rows = dequantized(hidden_states, given["a1q_scale"])
            pairs = matrices_of(self.quant_config, given["w1"], given["w2"])
            output.copy_(sums_of_experts(rows, local, given["topk_weights"], pairs, of_expert))

    class BatchedExperts(StandardExperts):
        """Leave the weights to the combine, as vLLM's batched experts do."""

        @staticmethod
        def activation_format() -> Any:
            return mk.FusedMoEActivationFormat.BatchedExperts

        def finalize_weight_and_reduce_impl(self) -> Any:
            return reduction.TopKWeightAndReduceDelegate()

        def workspace_shapes(self, num_rows: int, _: int, hidden: int, *args: Any) -> tuple[tuple[int, ...], ...]:
            shape = (args[2], num_rows, hidden)
            return shape, (1,), shape

        def apply(self, output: torch.Tensor, hidden_states: torch.Tensor, **given: Any) -> None:
            rows, counts = (
                dequantized(hidden_states, given["a1q_scale"]),
                given["expert_tokens_meta"].expert_num_tokens,
            )
            output.fill_(float("nan"))
            pairs = matrices_of(self.quant_config, given["w1"], given["w2"])
            for expert, (count, matrices) in enumerate(zip(counts.tolist(), pairs, strict=True)):
                output[expert, :count] = of_expert(rows[expert, :count], *matrices)

    kind = BatchedExperts if is_batched else StandardExperts
    # All that is abstract besides: what vLLM asks before it chooses experts.
    kind.__abstractmethods__ = frozenset()
    return kind
