"""A small random Qwen3-MoE model in FP8 as a folder, and vLLM's own layer that loads it on ranks."""

# ruff: noqa: PLC0415  vLLM and safetensors may not be installed

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from framework_jobs import Experts, dequantized, frameworks_on, relative, sums_of_experts, what_is_missing
from frozen_vllm import moe_kernel_quantize_input
from vllm_jobs import MAX_TOKENS, experts_class, on_cpu, registered

FP8, BLOCK = torch.float8_e4m3fn, 128
CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 256,
    "moe_intermediate_size": 128,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 1,
    "norm_topk_prob": True,
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
    },
}
LAYER = "model.layers.0.mlp"


def write_folder(folder: Path) -> None:
    """Write the router and the experts of a layer, named as in checkpoints on Hugging Face."""
    from safetensors.torch import save_file

    hidden, inner = CONFIG["hidden_size"], CONFIG["moe_intermediate_size"]
    random = torch.Generator().manual_seed(8)
    tensors = {f"{LAYER}.gate.weight": torch.randn(CONFIG["num_experts"], hidden, generator=random).bfloat16() / 4}
    for expert in range(CONFIG["num_experts"]):
        for name, shape in (("gate", (inner, hidden)), ("up", (inner, hidden)), ("down", (hidden, inner))):
            weight = torch.randn(shape, generator=random) / 8
            blocks = weight.view(shape[0] // BLOCK, BLOCK, shape[1] // BLOCK, BLOCK)
            scales = blocks.abs().amax((1, 3)) / 448
            codes = (blocks / scales[:, None, :, None]).view(shape).to(FP8)
            key = f"{LAYER}.experts.{expert}.{name}_proj.weight"
            tensors |= {key: codes, f"{key}_scale_inv": scales}
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file(tensors, folder / "model.safetensors")


def layers(group: dist.ProcessGroup, folder: Path) -> dict[str, list[float]] | str:
    """Errors of vLLM's FP8 layer between ranks against one rank, by backend; or what is missing to import it."""
    with frameworks_on("cpu"):
        try:
            import vllm.model_executor.layers.fused_moe.modular_kernel as mk
            from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
            from vllm.distributed import parallel_state
            from vllm.model_executor.layers.fused_moe import all2all_utils
            from vllm.v1.worker.workspace import init_workspace_manager
        except ModuleNotFoundError as missing:
            return what_is_missing(missing)
        from fusco.integrations import vllm as adapter

        init_workspace_manager(torch.device("cpu"))
        alone = mock.Mock(world_size=1, rank_in_group=0)
        # vLLM imports DeepEP's class on GPUs only; it asks it for the size of rows that DeepEP's kernels have.
        as_it_is = mock.Mock(maybe_roundup_layer_hidden_size=lambda hidden, *_: hidden)
        settings = VllmConfig(device_config=DeviceConfig(device="cpu"))
        errors = {}
        with (
            on_cpu(mk),
            torch.no_grad(),
            registered(adapter, group),
            set_current_vllm_config(settings),
            mock.patch.object(parallel_state, "_TP", alone),
            mock.patch.object(all2all_utils, "DeepEPLLPrepareAndFinalize", as_it_is, create=True),
        ):
            for backend in ("allgather_reducescatter", "deepep_low_latency"):
                layer = _loaded(mk, group, folder, backend)
                errors[backend] = [_error(layer, group, folder, num_tokens) for num_tokens in (16, 3, 0)]
    return errors


def _loaded(mk: Any, group: dist.ProcessGroup, folder: Path, backend: str) -> Any:
    """vLLM's layer with this rank's experts of the folder, by vLLM's own loaders; its kernel is what vLLM makes."""
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEParallelConfig, RoutingMethodType
    from vllm.model_executor.layers.fused_moe.expert_map_manager import ExpertMapManager
    from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
    from vllm.model_executor.layers.quantization import fp8
    from vllm.model_executor.model_loader.weight_utils import safetensors_weights_iterator

    config = json.loads((folder / "config.json").read_text())
    size, rank = group.size(), group.rank()
    num_experts, num_topk = config["num_experts"], config["num_experts_per_tok"]
    ranks = {"tp_size": 1, "pcp_size": 1, "tp_rank": 0, "pcp_rank": 0, "sp_size": 1, "dp_size": size, "ep_size": size}
    parallel = FusedMoEParallelConfig(
        **ranks, dp_rank=rank, ep_rank=rank, use_ep=True, all2all_backend=backend, enable_eplb=False
    )
    moe = FusedMoEConfig(
        num_experts=num_experts,
        experts_per_token=num_topk,
        hidden_dim=config["hidden_size"],
        intermediate_size=config["moe_intermediate_size"],
        num_local_experts=num_experts // size,
        num_logical_experts=num_experts,
        activation=MoEActivation.SILU,
        device="cpu",
        routing_method=RoutingMethodType.Renormalize,
        moe_parallel_config=parallel,
        in_dtype=torch.bfloat16,
        max_num_tokens=MAX_TOKENS,
    )
    maps = ExpertMapManager(
        max_num_batched_tokens=MAX_TOKENS,
        top_k=num_topk,
        global_num_experts=num_experts,
        num_redundant_experts=0,
        num_expert_group=None,
        moe_parallel_config=parallel,
        placement_strategy="linear",
        enable_eplb=False,
    )
    is_batched = backend == "deepep_low_latency"
    chosen = Fp8MoeBackend.BATCHED_TRITON if is_batched else Fp8MoeBackend.TRITON
    experts = experts_class(mk, is_batched=is_batched, matrices_of=matrices_of, of_expert=swiglu)
    with mock.patch.object(fp8, "select_fp8_moe_backend", return_value=(chosen, experts)):
        quantization = fp8.Fp8Config.from_config(config["quantization_config"])
        layer = RoutedExperts(f"{LAYER}.experts", torch.bfloat16, moe, quantization, maps)
    weights = safetensors_weights_iterator([str(folder / "model.safetensors")], use_tqdm_on_load=False)
    first = f"{LAYER}.experts."
    taken = layer.load_weights((name.removeprefix(first), each) for name, each in weights if name.startswith(first))
    assert len(list(taken)) == 6 * num_experts // size
    layer.quant_method.process_weights_after_loading(layer)
    assert type(layer.quant_method.moe_kernel.prepare_finalize).__module__ == "fusco.integrations.vllm"
    return layer


def matrices_of(quant_config: Any, w1: torch.Tensor, w2: torch.Tensor) -> Experts:
    """Matrices of FP8 experts in float32, from weights and from scales that vLLM's configuration has, or SGLang's."""
    pairs = zip(w1, quant_config.w1_scale, w2, quant_config.w2_scale, strict=True)
    return [(_wide(up, of_up), _wide(down, of_down)) for up, of_up, down, of_down in pairs]


def _wide(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """FP8 matrices times the scales of their blocks."""
    return codes.float() * scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)


def swiglu(rows: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """One expert."""
    gate, up = (rows @ gate_up.to(rows.dtype).T).chunk(2, dim=1)
    return (torch.nn.functional.silu(gate) * up) @ down.to(rows.dtype).T


def _error(layer: Any, group: dist.ProcessGroup, folder: Path, num_tokens: int) -> float:
    apply = layer.quant_method.apply
    return error_of_step(lambda *given: apply(layer, *given, None, None), group, folder, num_tokens)


def error_of_step(apply: Callable[..., torch.Tensor], group: dist.ProcessGroup, folder: Path, num_tokens: int) -> float:
    """The error of a step, relative to its largest value; the last rank has as many tokens, each other one more.

    ``apply`` returns a layer's output for tokens, their weights and experts.
    """
    from safetensors.torch import load_file

    tensors, num_topk = load_file(folder / "model.safetensors"), CONFIG["num_experts_per_tok"]
    random = torch.Generator().manual_seed(group.rank() + num_tokens)
    given = num_tokens + (group.size() - 1 - group.rank())
    x = torch.randn(given, CONFIG["hidden_size"], generator=random).bfloat16()
    scores = torch.softmax(x.float() @ tensors[f"{LAYER}.gate.weight"].float().T, -1)
    weights, ids = scores.topk(num_topk)
    weights /= weights.sum(-1, keepdim=True)
    out = apply(x, weights, ids)
    rows = dequantized(*moe_kernel_quantize_input(x, None, FP8, False, [BLOCK, BLOCK], is_scale_swizzled=False)).float()
    experts = []
    for expert in range(CONFIG["num_experts"]):
        keys = [f"{LAYER}.experts.{expert}.{name}_proj.weight" for name in ("gate", "up", "down")]
        gate, up, down = (_wide(tensors[key], tensors[f"{key}_scale_inv"]) for key in keys)
        experts.append((torch.cat([gate, up]), down))
    expected = sums_of_experts(rows, ids, weights, experts, swiglu)
    assert (out.shape, out.dtype) == (x.shape, torch.bfloat16)
    return relative([out], [expected])[0] if given else 0.0
