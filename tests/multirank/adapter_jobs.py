"""Functions on ranks: adapters of SGLang, VeOmni and torchtitan, between their calls, against dense experts."""

# ruff: noqa: PLC0415  adapters import what ``frozen`` installs

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from frozen_frameworks import (
    MAX_DECODE_TOKENS,
    CombineInputFormat,
    DeepEPv2CombineInput,
    HookRegistry,
    SGLangUnquantizedMethod,
    frozen,
    sglang_per_token_group_quant_fp8,
)

from comparison import largest_error
from fusco import MismatchError, Quantize
from fusco.core.quantization import dequantize_rows
from fusco.integrations import plugins

NUM_LOCAL, NUM_TOPK, HIDDEN = 3, 2, 64


def expert(rows: torch.Tensor, number: int) -> torch.Tensor:
    """What an expert computes."""
    return torch.tanh(rows * (1 + number))


def layer_input(
    rank: int, num_experts: int, num_tokens: int, width: int = HIDDEN
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, experts, one of them none, and weights."""
    random = torch.Generator().manual_seed(rank)
    x = torch.randn(num_tokens, width, generator=random)
    weights, ids = torch.rand(num_tokens, num_experts, generator=random).topk(NUM_TOPK)
    ids[:1, 0] = -1
    return x, ids, weights


def dense(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """All experts on one rank."""
    out = torch.zeros_like(x)
    for token, k in (ids >= 0).nonzero().tolist():
        out[token] += weights[token, k] * expert(x[token], int(ids[token, k]))
    return out


def sglang_layer(group: dist.ProcessGroup, quant_method: Any) -> list[float]:
    """Layers by the dispatcher that SGLang's hook returns: prefills and decode steps; one rank has no tokens."""
    rank, errors = group.rank(), []
    num_experts, width = NUM_LOCAL * group.size(), 2 * HIDDEN  # 128, a block of FP8 values
    with frozen(group), mock.patch.dict(os.environ, {"SGLANG_PLUGINS": "fusco"}):
        from sglang.srt.layers import dp_attention
        from sglang.srt.layers.moe import utils

        utils.scale_format.ue8m0 = is_ue8m0 = getattr(quant_method, "is_ue8m0", False)
        block = 32 if getattr(quant_method, "use_mxfp8", False) else 128
        kind = Quantize(block=block, scale="ue8m0" if is_ue8m0 else "float32", layout="tma" if is_ue8m0 else "row")
        plugins.load_into_sglang()
        ((_, hook),) = HookRegistry.hooks["sglang.srt.layers.moe.fused_moe_triton.layer.create_moe_dispatcher"]
        config = SimpleNamespace(num_experts=num_experts)
        dispatcher = hook(lambda *_: None, config, quant_method)
        for is_extend, num_tokens in (
            (True, 3 * rank),
            (True, 5 + 50 * rank),
            (False, 3 * rank),
            (False, 5 + 30 * rank),
        ):
            dp_attention.state.is_extend = is_extend
            x, ids, weights = layer_input(rank, num_experts, num_tokens, width)
            sent = dispatcher.dispatch(hidden_states=x, topk_output=SimpleNamespace(topk_ids=ids, topk_weights=weights))
            assert sent.use_masked_gemm is not is_extend
            assert sent.total_expanded == (0 if is_extend else len(sent.hidden_states))
            experts = [rank * NUM_LOCAL + local for local in range(NUM_LOCAL)]
            assert sent.activation_scale_block_size == block
            y = experts_in_blocks(sent, experts, kind, is_static=not is_extend)
            if (arrived := sent.hidden_states_scale) is not None:
                if is_ue8m0 and len(arrived):
                    assert arrived.stride() == (1, -(-len(arrived) // 4) * 4)
                made = sglang_per_token_group_quant_fp8(x, block, 1e-10, is_ue8m0, is_ue8m0, is_ue8m0)
                x = dequantize_rows(*made, kind, torch.float32)
            out = dispatcher.combine(combine_input=DeepEPv2CombineInput(y, None))
            errors.append(largest_error(out, dense(x, ids, weights)))
        texts = []
        x, ids, weights = layer_input(rank, num_experts, MAX_DECODE_TOKENS + 1, width)
        large = SimpleNamespace(topk_ids=ids, topk_weights=weights)
        for call in (
            lambda: dispatcher.combine(DeepEPv2CombineInput(y, None)),
            lambda: dispatcher.combine(DeepEPv2CombineInput(y, None, format=CombineInputFormat.STANDARD)),
            lambda: dispatcher.dispatch(x, large),
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


def sglang_rebalanced(group: dist.ProcessGroup, num_placements: int) -> float:
    """The largest error of layers whose experts SGLang's EPLB moves between steps; ids are physical, of any replica."""
    rank, size, largest = group.rank(), group.size(), 0.0
    num_physical, num_logical, width = NUM_LOCAL * size, NUM_LOCAL * size - size // 2, 2 * HIDDEN
    with frozen(group), mock.patch.dict(os.environ, {"SGLANG_PLUGINS": "fusco"}):
        from sglang.srt.layers import dp_attention

        plugins.load_into_sglang()
        ((_, hook),) = HookRegistry.hooks["sglang.srt.layers.moe.fused_moe_triton.layer.create_moe_dispatcher"]
        method = SGLangUnquantizedMethod()
        dispatcher = hook(lambda *_: None, SimpleNamespace(num_experts=num_physical), method)
        for number in range(num_placements):
            dp_attention.state.is_extend = is_extend = number % 2 == 0
            random = np.random.default_rng(number)
            redundant = random.integers(0, num_logical, num_physical - num_logical)
            placed = random.permutation([*range(num_logical), *redundant])
            x, ids, weights = layer_input(rank, num_logical, 7 + number + 20 * rank, width)
            replicas = [np.flatnonzero(placed == expert) for expert in range(num_logical)]
            physical = [[-1 if each < 0 else random.choice(replicas[each]) for each in row] for row in ids.tolist()]
            topk = SimpleNamespace(topk_ids=torch.tensor(physical), topk_weights=weights)
            sent = dispatcher.dispatch(hidden_states=x, topk_output=topk)
            experts = placed[rank * NUM_LOCAL : (rank + 1) * NUM_LOCAL].tolist()
            y = experts_in_blocks(sent, experts, Quantize(), is_static=not is_extend)
            out = dispatcher.combine(combine_input=DeepEPv2CombineInput(y, None))
            largest = max(largest, largest_error(out, dense(x, ids, weights)))
        dispatcher._rows.comms.abort()
    return largest


def experts_in_blocks(sent: Any, experts: list[int], kind: Quantize, *, is_static: bool) -> torch.Tensor:
    """Weighted results of rows in blocks of 128, those behind the last block undefined."""
    rows, ends = sent.hidden_states, sent.psum_num_recv_tokens_per_expert.tolist()
    assert sent.topk_weights.shape == (len(rows),)
    wide = rows.float()
    if sent.hidden_states_scale is not None:
        wide = dequantize_rows(rows, sent.hidden_states_scale, kind, torch.float32)
    y, first = torch.full(rows.shape, float("nan")), 0
    for local, end in enumerate(ends):
        y[first:end] = expert(wide[first:end], experts[local])
        assert first % 128 == 0
        assert end - first <= sent.masked_max_m or not is_static
        first = -(-end // 128) * 128
    assert first <= len(rows) if is_static else first == len(rows)
    # FP8 rows come back in 16 bits.
    return (y * sent.topk_weights[:, None]).to(rows.dtype if rows.dtype == torch.float32 else torch.bfloat16)


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
            errors += [largest_error(one, other) / float(other.abs().max()) for one, other in pairs]
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
            return largest_error(layer.combine(y, metadata, x), expected[:, :width])

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
