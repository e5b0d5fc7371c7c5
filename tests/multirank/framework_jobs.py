"""Functions on ranks: layers of frameworks, as they are, through the ``deep_ep`` module or their own interfaces."""

# ruff: noqa: PLC0415  frameworks may not be installed

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

import fusco
from comparison import largest_error

NUM_EXPERTS, NUM_TOPK, HIDDEN, INNER = 8, 2, 64, 96


class _NoStream:
    """A CUDA stream for code that makes one unasked."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __getattr__(self, name: str) -> object:
        return lambda *_, **__: None


@contextlib.contextmanager
def frameworks_on(device: str):
    """Let frameworks find ``deep_ep`` and, on the CPU, let code that names CUDA run without it."""
    real_zeros = torch.zeros

    def zeros(*shape, **options):
        return real_zeros(*shape, **{**options, **({"device": "cpu"} if options.get("device") == "cuda" else {})})

    with contextlib.ExitStack() as stack:
        replaced = {
            "current_device": lambda: torch.device("cpu"),
            "Stream": _NoStream,
            "current_stream": lambda *_: _NoStream(),
            "stream": lambda _: contextlib.nullcontext(),
            "synchronize": lambda *_: None,
        }
        for name, value in replaced.items() if device == "cpu" else ():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        if device == "cpu":
            stack.enter_context(mock.patch.object(torch, "zeros", zeros))
        sys.path.insert(0, str(Path(fusco.__file__).parent / "integrations" / "path"))
        stack.callback(sys.path.pop, 0)
        yield


def what_is_missing(error: ModuleNotFoundError) -> str:
    """Return what a framework needs and is not installed; raise the error again if that is ``deep_ep`` or of fusco."""
    if str(error.name).partition(".")[0] in ("deep_ep", "fusco"):
        raise error
    return str(error)


def expert_weights() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The two matrices of every expert."""
    random = torch.Generator().manual_seed(5)
    return [
        (torch.randn(INNER, HIDDEN, generator=random) / 8, torch.randn(HIDDEN, INNER, generator=random) / 8)
        for _ in range(NUM_EXPERTS)
    ]


def router_weights() -> torch.Tensor:
    """The router's matrix."""
    return torch.randn(NUM_EXPERTS, HIDDEN, generator=torch.Generator().manual_seed(6)) / 4


def inputs_of(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens, more in each step, and gradients of their outputs."""
    random = torch.Generator().manual_seed(100 * step + rank)
    num_tokens = (5 + 3 * rank, 40 + 7 * rank)[step]
    x, grad = (torch.randn(num_tokens, HIDDEN, generator=random) for _ in range(2))
    return x, grad


Experts = list[tuple[torch.Tensor, torch.Tensor]]


def dense_layer(x: torch.Tensor, router: torch.Tensor, experts: Experts) -> torch.Tensor:
    """The layer on one rank: softmax, top-k, experts with GELU, weighted sum."""
    weights, ids = torch.softmax(x @ router.T, -1).topk(NUM_TOPK)
    out = torch.zeros_like(x)
    for expert, (first, second) in enumerate(experts):
        token, k = (ids == expert).nonzero(as_tuple=True)
        rows = torch.nn.functional.gelu(x[token] @ first.T) @ second.T
        out = out.index_add(0, token, rows * weights[token, k][:, None])
    return out


def with_gelu(rows: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """One expert."""
    return torch.nn.functional.gelu(rows @ up.to(rows.dtype).T) @ down.to(rows.dtype).T


def sums_of_experts(
    rows: torch.Tensor, local_ids: torch.Tensor, weights: torch.Tensor, experts: Experts, of_expert=with_gelu
) -> torch.Tensor:
    """The weighted sum of a rank's experts, in the rows' dtype, for each row; ids of other experts are negative."""
    sums = torch.zeros(rows.shape)
    for expert, matrices in enumerate(experts):
        row, k = (local_ids == expert).nonzero(as_tuple=True)
        y = of_expert(rows[row], *matrices)
        sums.index_add_(0, row, y.float() * weights[row, k][:, None])
    return sums.to(rows.dtype)


def wide(rows: torch.Tensor) -> torch.Tensor:
    """Rows twice as wide: a block of FP8 values."""
    return torch.cat([rows, rows.flip(1)], 1)


def wide_experts() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Experts of such rows, in bfloat16."""
    pairs = [(wide(up) / 2, torch.cat([down, down.flip(0)], 0)) for up, down in expert_weights()]
    return [(up.bfloat16(), down.bfloat16()) for up, down in pairs]


def dequantized(rows: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    """What FP8 rows with a scale for each block stand for, in bfloat16; others as they are."""
    if scales is None:
        return rows
    return (rows.float() * scales.repeat_interleave(rows.shape[-1] // scales.shape[-1], -1)).bfloat16()


def dense_step(group: dist.ProcessGroup, step: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """In float32, of numbers in ``dtype``: this rank's output and gradients of x and router, and of its experts.

    It differs from the same in float64 by up to 7.5e-7 of the largest value, as any order of sums does.
    """
    experts = [tuple(w.to(dtype).float().requires_grad_() for w in pair) for pair in expert_weights()]
    for rank in range(group.size()):
        x, grad = (each.to(dtype).float() for each in inputs_of(rank, step))
        router = router_weights().to(dtype).float().requires_grad_()
        out = dense_layer(x.requires_grad_(), router, experts)
        out.backward(grad)
        if rank == group.rank():
            of_rank = [out.detach(), x.grad, router.grad]
    num_local = NUM_EXPERTS // group.size()
    mine = experts[group.rank() * num_local :][:num_local]
    return [*of_rank, *(weight.grad for pair in mine for weight in pair)]


def relative(values: list[torch.Tensor], references: list[torch.Tensor]) -> list[float]:
    """The largest error of each tensor over its largest value."""
    pairs = zip(values, references, strict=True)
    return [largest_error(value.view_as(each), each) / float(each.abs().max()) for value, each in pairs]


def megatron_layer(
    group: dist.ProcessGroup, device: str, dtype: torch.dtype, backend: str, recompute: bool = False
) -> list[float]:
    """Two steps of Megatron's ``MoELayer``, the second with more tokens; errors of outputs and gradients.

    ``backend`` is one of the flex dispatcher, or ``"spec"`` for the layer that fusco's spec has.
    """
    with frameworks_on(device):
        layer = _make_megatron_layer(group, backend, dtype).to(device)
        errors = []
        for step in range(2):
            given, grad = (each.to(device, dtype).unsqueeze(1) for each in inputs_of(group.rank(), step))
            x = given.requires_grad_()
            layer.zero_grad(set_to_none=True)
            # Megatron's dispatcher keeps a state from dispatch to combine: it must run again as a whole.
            with torch.utils.checkpoint.set_checkpoint_early_stop(False):
                if recompute:
                    out = torch.utils.checkpoint.checkpoint(lambda rows: layer(rows)[0], x, use_reentrant=False)
                else:
                    out = layer(x)[0]
            out.backward(grad)
            experts = layer.experts.local_experts
            grads = [fc.weight.grad for expert in experts for fc in (expert.linear_fc1, expert.linear_fc2)]
            errors += relative([out, x.grad, layer.router.weight.grad, *grads], dense_step(group, step, dtype))
        return errors


def killed_in_megatron(group: dist.ProcessGroup, device: str) -> None:
    """The process of rank 1 is killed in the experts of a layer."""
    with frameworks_on(device):
        layer = _make_megatron_layer(group, "hybridep", torch.float32).to(device)
        if group.rank() == 1:
            layer.experts.register_forward_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        layer(inputs_of(group.rank(), 0)[0].to(device).unsqueeze(1))


def _make_megatron_layer(group: dist.ProcessGroup, backend: str, dtype: torch.dtype) -> torch.nn.Module:
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.moe import fused_a2a, moe_utils
    from megatron.core.transformer.moe.experts import SequentialMLP
    from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec, build_module
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules

    from fusco.integrations.megatron import FuscoMoELayer, with_fusco

    assert fused_a2a.HAVE_DEEP_EP
    assert fused_a2a.HAVE_HYBRIDEP
    moe_utils.te_general_gemm = None  # without TransformerEngine, 0.16 does not define it
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(expert_model_parallel_size=group.size())
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        num_moe_experts=NUM_EXPERTS,
        moe_router_topk=NUM_TOPK,
        moe_ffn_hidden_size=INNER,
        add_bias_linear=False,
        expert_model_parallel_size=group.size(),
        moe_router_dtype="fp32",
        use_cpu_initialization=True,
        moe_router_load_balancing_type="none",
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        gradient_accumulation_fusion=False,
        moe_router_pre_softmax=True,
        **({} if backend == "spec" else {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": backend}),
    )
    linear = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    submodules = MoESubmodules(experts=ModuleSpec(module=SequentialMLP, submodules=linear))
    spec = ModuleSpec(module=MoELayer, submodules=submodules)
    if backend == "spec":
        spec = with_fusco(TransformerLayerSubmodules(mlp=spec)).mlp
        assert spec.module is FuscoMoELayer
    layer = build_module(spec, config, layer_number=1)
    num_local = NUM_EXPERTS // group.size()
    with torch.no_grad():
        layer.router.weight.copy_(router_weights())
        for expert, weights in zip(
            layer.experts.local_experts, expert_weights()[group.rank() * num_local :], strict=False
        ):
            expert.linear_fc1.weight.copy_(weights[0])
            expert.linear_fc2.weight.copy_(weights[1])
    return layer.train()


def automodel_layers(group: dist.ProcessGroup, device: str, dtype: torch.dtype) -> list[list[torch.Tensor]]:
    """Outputs and gradients through Automodel's dispatcher, by each backend, and by indices in place of maps."""
    with frameworks_on(device):
        from nemo_automodel.components.moe.megatron.token_dispatcher import (
            MoEFlexTokenDispatcher,
            TokenDispatcherConfig,
        )

        num_local, results = NUM_EXPERTS // group.size(), []
        for backend, has_indices in (("deepep", False), ("hybridep", False), ("hybridep", True)):
            config = TokenDispatcherConfig(
                moe_router_topk=NUM_TOPK,
                num_moe_experts=NUM_EXPERTS,
                moe_permute_fusion=False,
                moe_router_dtype="fp32",
                moe_flex_dispatcher_backend=backend,
                moe_hybridep_compact_routing=has_indices,
                moe_share_token_dispatcher=False,
            )
            local = list(range(group.rank() * num_local, (group.rank() + 1) * num_local))
            dispatcher = MoEFlexTokenDispatcher(num_local, local, config, group)
            x, grad = (each.to(device, dtype) for each in inputs_of(group.rank(), 0))
            x.requires_grad_()
            random = torch.Generator().manual_seed(group.rank())
            weights, ids = torch.randn(len(x), NUM_EXPERTS, generator=random).softmax(-1).topk(NUM_TOPK)
            weights, ids = weights.to(device).requires_grad_(), ids.to(device)
            rows, counts, row_weights = dispatcher.token_permutation2(x, len(x), weights, ids)
            y = (torch.tanh(rows) * row_weights[:, None]).to(dtype)
            out = dispatcher.token_unpermutation(y)
            out.backward(grad)
            # Each token's row is the same whichever rank its experts are on.
            exact = (x.detach().double().tanh() * weights.detach().double().sum(1, keepdim=True)).cpu()
            assert relative([out], [exact])[0] < (1e-2 if dtype == torch.bfloat16 else 1e-6)
            tensors = (out.detach(), x.grad, weights.grad, torch.as_tensor(counts))
            results.append([tensor.cpu() for tensor in tensors])
        return results


def torchtitan_dispatchers(group: dist.ProcessGroup) -> list[list[torch.Tensor]]:
    """Rows, counts, outputs and gradients of torchtitan's own dispatcher, and of fusco's by its override."""
    from torch.distributed.device_mesh import DeviceMesh
    from torchtitan.distributed.utils import set_spmd_backend
    from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher

    from fusco.integrations.torchtitan import FuscoSelectiveAC, FuscoTokenDispatcher, dispatcher

    set_spmd_backend("default")
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("ep",))
    config = AllToAllTokenDispatcher.Config(num_experts=NUM_EXPERTS, top_k=NUM_TOPK)
    results = []
    for each in (config, dispatcher(config, max_tokens_per_rank=64)):
        made = (FuscoTokenDispatcher if results else AllToAllTokenDispatcher)(each)
        made.wire_meshes(ep_mesh=mesh)
        random = torch.Generator().manual_seed(group.rank())
        x = torch.randn(37, HIDDEN, generator=random, requires_grad=True)
        scores, ids = torch.randn(37, NUM_EXPERTS, generator=random).softmax(-1).topk(NUM_TOPK)
        scores = scores.detach().requires_grad_()
        rows, counts, metadata = made.dispatch(x, scores, ids, torch.bincount(ids.view(-1), minlength=NUM_EXPERTS))
        out = made.combine(torch.tanh(rows), metadata, x)
        out.backward(torch.ones_like(out))
        results.append([rows.detach(), torch.as_tensor(counts).long(), out.detach(), x.grad, scores.grad])
    assert torch.ops.fusco.dispatch.default in FuscoSelectiveAC(FuscoSelectiveAC.Config()).get_save_ops()
    return results
