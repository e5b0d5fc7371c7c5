"""SGLang's own layer on ranks, loaded from the folder of a random Qwen3-MoE in FP8; its products are PyTorch's."""

# ruff: noqa: PLC0415  SGLang may not be installed

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from framework_jobs import dequantized, frameworks_on, sums_of_experts, what_is_missing
from frozen_frameworks import sglang_per_token_group_quant_fp8
from model_folder_jobs import CONFIG, LAYER, error_of_step, matrices_of, swiglu
from sglang_jobs import without_unused

MAX_TOKENS, ALIGNMENT = 32, 128
STEPS = [(is_prefill, num_tokens) for num_tokens in (16, 3, 0) for is_prefill in (True, False)]


def layers(group: dist.ProcessGroup, folder: Path) -> dict[str, list[float]] | str:
    """Errors of SGLang's FP8 layer against one rank in prefills and decode steps, by backend; or what is missing.

    ``deepep`` is on fusco's module, ``deepep_v2`` on fusco's dispatcher, which SGLang loads as a plugin.
    """
    variables = {
        "SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK": str(MAX_TOKENS),
        "SGLANG_DEEPEP_V2_NUM_MAX_DISPATCH_TOKENS_PER_RANK": str(MAX_TOKENS),
        "SGLANG_PLUGINS": "fusco",
    }
    a_gpu = SimpleNamespace(multi_processor_count=132)
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, variables))
        stack.enter_context(mock.patch.object(torch.cuda, "get_device_properties", return_value=a_gpu))
        for context in (frameworks_on("cpu"), without_unused(), torch.no_grad()):
            stack.enter_context(context)
        try:
            from sglang.kernels.ops.quantization import fp8_kernel
            from sglang.srt.layers import deep_gemm_wrapper
            from sglang.srt.layers.moe.moe_runner.runner import register_moe_runner_core
            from sglang.srt.layers.moe.token_dispatcher import deepep
            from sglang.srt.plugins import load_plugins
        except ModuleNotFoundError as missing:
            return f"SGLang cannot be imported: {what_is_missing(missing)}"
        load_plugins()
        stack.enter_context(mock.patch.object(deep_gemm_wrapper, "ENABLE_JIT_DEEPGEMM", new=True))
        name = sglang_per_token_group_quant_fp8.__name__
        for module in (deepep, fp8_kernel):
            stack.enter_context(mock.patch.object(module, name, sglang_per_token_group_quant_fp8, create=True))
        with contextlib.suppress(ValueError):  # registered in a test before
            register_moe_runner_core("deep_gemm", _products)
        return {backend: _errors(group, folder, backend) for backend in ("deepep", "deepep_v2")}


def _errors(group: dist.ProcessGroup, folder: Path, backend: str) -> list[float]:
    from sglang.srt.layers.dp_attention import set_is_extend_in_batch
    from sglang.srt.layers.moe.topk import StandardTopKOutput

    errors = []
    with _served(group, backend):
        layer = _loaded(group, folder)
        is_fuscos = type(layer.dispatcher).__module__ == "fusco.integrations.sglang"
        assert is_fuscos == (backend == "deepep_v2"), layer.dispatcher
        for is_prefill, num_tokens in STEPS:
            set_is_extend_in_batch(is_prefill)

            def apply(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
                return layer(x, StandardTopKOutput(weights, ids, weights))

            errors.append(error_of_step(apply, group, folder, num_tokens))
    return errors


@contextlib.contextmanager
def _served(group: dist.ProcessGroup, backend: str) -> Iterator[None]:
    """Configure SGLang as a server would that has been started with this backend."""
    from sglang.srt.layers.moe.utils import initialize_moe_config
    from sglang.srt.runtime_context import get_context, get_parallel

    size = group.size()
    arguments = {"moe_a2a_backend": backend, "moe_runner_backend": "deep_gemm", "deepep_mode": "auto"}
    ranks = {"moe_ep_size": size, "moe_ep_rank": group.rank(), "moe_tp_size": 1, "moe_tp_rank": 0}
    with (
        get_context().override_server_args(**arguments, tp_size=size, ep_size=size),
        get_parallel().override(**ranks, tp_group=SimpleNamespace(device_group=group)),
    ):
        initialize_moe_config()
        yield


def _loaded(group: dist.ProcessGroup, folder: Path) -> Any:
    """SGLang's layer with this rank's experts of the folder, by SGLang's own loaders."""
    from sglang.srt.layers.moe.ep_moe.layer import DeepEPMoE
    from sglang.srt.layers.quantization.fp8 import Fp8Config
    from sglang.srt.model_loader.weight_utils import safetensors_weights_iterator

    layer = DeepEPMoE(
        num_experts=CONFIG["num_experts"],
        top_k=CONFIG["num_experts_per_tok"],
        hidden_size=CONFIG["hidden_size"],
        intermediate_size=CONFIG["moe_intermediate_size"],
        layer_id=0,
        params_dtype=torch.bfloat16,
        quant_config=Fp8Config.from_config(CONFIG["quantization_config"]),
        prefix=f"{LAYER}.experts",
    )
    for parameter in layer.parameters():
        parameter.data.view(torch.uint8).fill_(0x7F)  # NaN in FP8, and large in float32
    parameters = dict(layer.named_parameters(prefix="experts"))
    mapping = DeepEPMoE.make_expert_params_mapping("gate_proj", "down_proj", "up_proj", CONFIG["num_experts"])
    for key, weight in safetensors_weights_iterator([str(folder / "model.safetensors")]):
        for of_parameter, of_weight, expert, shard in mapping:
            if of_weight in key:
                parameter = parameters[key.removeprefix(f"{LAYER}.").replace(of_weight, of_parameter)]
                parameter.weight_loader(parameter, weight, key, shard_id=shard, expert_id=expert)
    layer.quant_method.process_weights_after_loading(layer)
    return layer


def _products(config: Any) -> Any:
    """Experts in place of DeepGEMM's, of all layouts in which its products read rows."""
    from sglang.srt.layers.moe.moe_runner.base import DispatchMoeRunnerCore, MoeRunnerBackend
    from sglang.srt.layers.moe.token_dispatcher import deepep, deepep_v2

    class Products(DispatchMoeRunnerCore):
        @property
        def runner_backend(self) -> Any:
            return MoeRunnerBackend.DEEP_GEMM

        def run_from_dispatch(self, sent: Any, quant_info: Any, runner_config: Any, hooks: Any = None) -> Any:
            assert sent.hidden_states.dtype == torch.float8_e4m3fn
            scales = SimpleNamespace(w1_scale=quant_info.w13_scale, w2_scale=quant_info.w2_scale)
            experts = matrices_of(scales, quant_info.w13_weight, quant_info.w2_weight)
            rows = dequantized(sent.hidden_states, sent.hidden_states_scale)
            if hasattr(sent, "masked_m"):
                y = torch.full_like(rows, torch.nan)
                for local, count in enumerate(sent.masked_m.tolist()):
                    y[local, :count] = swiglu(rows[local, :count], *experts[local])
                return deepep.DeepEPLLCombineInput(y, sent.topk_ids, sent.topk_weights)
            if not hasattr(sent, "is_expanded"):
                y = sums_of_experts(rows, sent.topk_ids, sent.topk_weights, experts, swiglu)
                return deepep.DeepEPNormalCombineInput(y, sent.topk_ids, sent.topk_weights)
            y, first = torch.full_like(rows, torch.nan), 0
            for pair, end in zip(experts, sent.psum_num_recv_tokens_per_expert.tolist(), strict=True):
                y[first:end] = swiglu(rows[first:end], *pair) * sent.topk_weights[first:end, None]
                first = -(-end // ALIGNMENT) * ALIGNMENT
            return deepep_v2.DeepEPv2CombineInput(y, None)

    return Products(config)
