"""Functions on ranks: adapters of vLLM, SGLang, VeOmni and torchtitan, between their calls, against dense experts."""

# ruff: noqa: PLC0415  adapters import what ``frozen`` installs

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from frozen_frameworks import (
    ActivationFormat,
    CombineInputFormat,
    DeepEPv2CombineInput,
    Delegate,
    HookRegistry,
    NoOP,
    SGLangUnquantizedMethod,
    UnquantizedFusedMoEMethod,
    frozen,
)

from fusco import MismatchError
from fusco.integrations import plugins

NUM_LOCAL, NUM_TOPK, HIDDEN = 3, 2, 64


def expert(rows: torch.Tensor, number: int) -> torch.Tensor:
    """What an expert computes."""
    return torch.tanh(rows * (1 + number))


def layer_input(rank: int, num_experts: int, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, experts, one of them none, and weights."""
    random = torch.Generator().manual_seed(rank)
    x = torch.randn(num_tokens, HIDDEN, generator=random)
    weights, ids = torch.rand(num_tokens, num_experts, generator=random).topk(NUM_TOPK)
    ids[:1, 0] = -1
    return x, ids, weights


def dense(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """All experts on one rank."""
    out = torch.zeros_like(x)
    for token, k in (ids >= 0).nonzero().tolist():
        out[token] += weights[token, k] * expert(x[token], int(ids[token, k]))
    return out


class FrozenExperts:
    """Experts of vLLM, which leave the weights to ``finalize`` or apply them."""

    is_delegating = True

    def __init__(self, moe_config, quant_config) -> None:
        self.quant_config = quant_config

    @staticmethod
    def activation_format() -> ActivationFormat:
        return ActivationFormat.Standard

    @staticmethod
    def is_monolithic() -> bool:
        return False

    def reduction(self) -> object:
        return Delegate() if self.is_delegating else NoOP()

    def apply(self, rows, ids, weights, expert_map) -> torch.Tensor:
        assert (expert_map[ids[:, 0]] >= 0).all(), "rows are of this rank's experts"
        assert (ids[1:, 0] >= ids[:-1, 0]).all(), "rows are by expert"
        y = torch.cat([rows[:0], *(expert(row[None], int(e)) for row, e in zip(rows, ids[:, 0], strict=True))])
        return y[:, None] if self.is_delegating else y * weights


class WeighingExperts(FrozenExperts):
    is_delegating = False


def vllm_layers(group: dist.ProcessGroup) -> list[float]:
    """Layers as vLLM makes them once plugins are loaded; numbers of tokens differ, and one rank has none."""
    rank, size, errors = group.rank(), group.size(), []
    num_experts = NUM_LOCAL * size
    expert_map = torch.full((num_experts,), -1, dtype=torch.int32)
    expert_map[rank * NUM_LOCAL : (rank + 1) * NUM_LOCAL] = torch.arange(NUM_LOCAL, dtype=torch.int32)
    moe = SimpleNamespace(moe_parallel_config=SimpleNamespace(use_all2all_kernels=True), num_experts=num_experts)
    with frozen(group), mock.patch.dict(os.environ, {"VLLM_PLUGINS": "other, fusco"}):
        plugins.load_into_vllm()
        plugins.load_into_vllm()  # as processes do
        for experts in (FrozenExperts, WeighingExperts):
            method = UnquantizedFusedMoEMethod(moe, experts)
            method._init_moe_kernel(layer=None)
            for num_tokens in (3 * rank, 5 + 30 * rank):
                x, ids, weights = layer_input(rank, num_experts, num_tokens)
                out = method.moe_kernel.apply(x, weights, ids, num_experts, expert_map)
                errors.append(float((out - dense(x, ids, weights)).abs().max()) if num_tokens else 0.0)
        method.moe_kernel.prepare_finalize._rows.comms.abort()
    return errors


def vllm_refusals(group: dist.ProcessGroup) -> list[str]:
    """Texts of errors; and the kernel of a layer whose experts are not distributed."""
    with frozen(group):
        from fusco.integrations.vllm import FuscoMoEMethod, FuscoPrepareAndFinalize

        class Batched(FrozenExperts):
            @staticmethod
            def activation_format() -> ActivationFormat:
                return ActivationFormat.BatchedExperts

        distributed = SimpleNamespace(moe_parallel_config=SimpleNamespace(use_all2all_kernels=True), num_experts=4)
        alone = SimpleNamespace(moe_parallel_config=SimpleNamespace(use_all2all_kernels=False), num_experts=4)
        method = FuscoMoEMethod(alone, FrozenExperts)
        method._init_moe_kernel(layer=None)
        x, ids, weights = layer_input(0, 4, 2)
        plain = SimpleNamespace(quant_dtype=None)
        made = FuscoPrepareAndFinalize(group, 4)
        texts = [method.moe_kernel]
        for call in (
            lambda: FuscoMoEMethod(distributed, Batched)._init_moe_kernel(layer=None),
            lambda: FuscoPrepareAndFinalize(group, 5),
            lambda: made.prepare(x, weights, ids, 4, None, False, SimpleNamespace(quant_dtype="fp8"), False),
            lambda: made.prepare(x, weights, ids, 8, None, False, plain, False),
            lambda: made.prepare(x, weights, ids, 4, torch.tensor([0, -1, 1, -1]), False, plain, False),
            lambda: made.prepare(x, weights, ids, 4, None, True, plain, False),
            lambda: made.finalize(x, x, weights, ids, False, Delegate()),
        ):
            try:
                call()
            except (ValueError, NotImplementedError) as error:
                texts.append(str(error))
        return texts


def sglang_layer(group: dist.ProcessGroup) -> list[float]:
    """Layers by the dispatcher that SGLang's hook returns; ranks have different numbers of tokens, one has none."""
    rank, errors = group.rank(), []
    num_experts = NUM_LOCAL * group.size()
    with frozen(group), mock.patch.dict(os.environ, {"SGLANG_PLUGINS": "fusco"}):
        plugins.load_into_sglang()
        ((_, hook),) = HookRegistry.hooks["sglang.srt.layers.moe.fused_moe_triton.layer.create_moe_dispatcher"]
        config = SimpleNamespace(num_experts=num_experts)
        dispatcher = hook(lambda *_: None, config, SGLangUnquantizedMethod())
        for num_tokens in (3 * rank, 5 + 30 * rank):
            x, ids, weights = layer_input(rank, num_experts, num_tokens)
            sent = dispatcher.dispatch(hidden_states=x, topk_output=SimpleNamespace(topk_ids=ids, topk_weights=weights))
            rows, ends = sent.hidden_states, sent.psum_num_recv_tokens_per_expert.tolist()
            assert sent.topk_weights.shape == (len(rows),)
            y, first = torch.full_like(rows, float("nan")), 0
            for local, end in enumerate(ends):
                y[first:end] = expert(rows[first:end], rank * NUM_LOCAL + local)
                assert first % 128 == 0
                first = -(-end // 128) * 128
            assert first == len(rows)
            y.mul_(sent.topk_weights[:, None])
            out = dispatcher.combine(combine_input=DeepEPv2CombineInput(y, None))
            errors.append(float((out - dense(x, ids, weights)).abs().max()) if num_tokens else 0.0)
        texts = []
        for call in (
            lambda: hook(lambda *_: None, config, object()),
            lambda: dispatcher.combine(DeepEPv2CombineInput(y, None)),
            lambda: dispatcher.combine(DeepEPv2CombineInput(y, None, format=CombineInputFormat.STANDARD)),
        ):
            try:
                call()
            except (ValueError, NotImplementedError) as error:
                texts.append(str(error))
        assert len(texts) == 3, texts
        dispatcher._rows.comms.abort()
    with frozen(group, "none"):
        from fusco.integrations.sglang import make_dispatcher

        assert make_dispatcher(lambda *_: "SGLang's own", config, object()) == "SGLang's own"
    return errors


def veomni_layer(group: dist.ProcessGroup) -> list[float]:
    """Errors of outputs and gradients, by each of the two ways that models call experts."""
    rank, num_experts, inner, errors = group.rank(), NUM_LOCAL * group.size(), 48, []
    random = torch.Generator().manual_seed(9)
    up, down = (
        torch.randn(num_experts, *shape, generator=random) / 8 for shape in ((2 * inner, HIDDEN), (HIDDEN, inner))
    )
    mine = slice(rank * NUM_LOCAL, (rank + 1) * NUM_LOCAL)
    with frozen(group):
        from veomni.ops.kernel_registry import KERNEL_REGISTRY
        from veomni.ops.kernels import moe

        from fusco.integrations import veomni

        veomni.register()
        veomni.register()
        moe.apply_veomni_fused_moe_patch("fusco")
        module = SimpleNamespace(num_experts=num_experts, gate_up_proj=up[mine], down_proj=down[mine])

        def by_pointer(module, x, ids, weights) -> torch.Tensor:
            gates, factors = module.gate_up_proj.chunk(2, dim=1)
            return moe._fused_moe_forward(num_experts, weights, ids, x, gates, factors, module.down_proj)

        inputs = [layer_input(r, num_experts, 5 + 30 * r) for r in range(group.size())]
        for call in (KERNEL_REGISTRY.resolve("moe_experts", "standard", "fusco"), by_pointer):
            leaves = [up[mine].clone(), down[mine].clone(), inputs[rank][0].clone(), inputs[rank][2].clone()]
            module.gate_up_proj, module.down_proj, x, weights = (leaf.requires_grad_() for leaf in leaves)
            out = call(module, x[None], inputs[rank][1], weights)
            out.square().sum().backward()
            all_up, all_down = up.clone().requires_grad_(), down.clone().requires_grad_()
            for r, (x_of_rank, ids, w) in enumerate(inputs):
                dense_x, dense_w = x_of_rank.clone().requires_grad_(), w.clone().requires_grad_()
                expected = dense_swiglu(dense_x, ids, dense_w, all_up, all_down)
                expected.square().sum().backward()
                if r == rank:
                    pairs = [(out[0], expected), (x.grad, dense_x.grad), (weights.grad, dense_w.grad)]
            pairs += [(module.gate_up_proj.grad, all_up.grad[mine]), (module.down_proj.grad, all_down.grad[mine])]
            errors += [float((one - other).abs().max() / other.abs().max()) for one, other in pairs]
        with pytest.raises(ValueError, match="quack"):
            moe.apply_veomni_fused_moe_patch("quack")
    return errors


def torchtitan_layers(group: dist.ProcessGroup) -> tuple[list[float], int, list[str]]:
    """Return errors of two layers' outputs, the number of communicators, and errors where rank 1 swaps the layers."""
    rank, num_experts = group.rank(), group.size() * NUM_LOCAL
    with frozen(group):
        from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher

        from fusco.integrations.torchtitan import FuscoTokenDispatcher, dispatcher

        config = AllToAllTokenDispatcher.Config(num_experts=num_experts, top_k=NUM_TOPK)
        layers = [FuscoTokenDispatcher(dispatcher(config, max_tokens_per_rank=64)) for _ in range(2)]
        for layer in layers:
            layer.wire_meshes(ep_mesh=SimpleNamespace(get_group=lambda: group))
        x, ids, weights = layer_input(rank, num_experts, 9 + rank)
        expected = dense(x, ids, weights)

        def run(layer: Any, width: int) -> float:
            rows, counts, metadata = layer.dispatch(x[:, :width].contiguous(), weights, ids, torch.empty(0))
            blocks = rows.split(counts.tolist())
            y = torch.cat([expert(block, rank * NUM_LOCAL + i) for i, block in enumerate(blocks)])
            return float((layer.combine(y, metadata, x) - expected[:, :width]).abs().max())

        errors = [run(layers[0], HIDDEN), run(layers[1], HIDDEN), run(layers[1], HIDDEN // 2)]
        (shared,) = {each._dispatcher for each in layers}
        texts = []
        for widths in ((HIDDEN, HIDDEN // 2), (HIDDEN // 2, HIDDEN)):
            with pytest.raises(MismatchError) as raised:
                run(layers[0], widths[rank])
            texts.append(str(raised.value))
        errors.append(run(layers[0], HIDDEN))
        num_communicators = len(shared._communicators)
        shared.close()
    return errors, num_communicators, texts


def dense_swiglu(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """All experts on one rank."""
    out = torch.zeros_like(x)
    for number in range(len(up)):
        token, k = (ids == number).nonzero(as_tuple=True)
        gate, factor = (x[token] @ up[number].T).chunk(2, dim=-1)
        rows = (torch.nn.functional.silu(gate) * factor) @ down[number].T
        out = out.index_add(0, token, rows * weights[token, k][:, None])
    return out
