"""Functions on ranks: fusco's adapter of vLLM between vLLM's calls, against dense experts of the same rows."""

# ruff: noqa: PLC0415  adapters import what ``frozen`` installs

from __future__ import annotations

import os
from typing import ClassVar
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from adapter_jobs import HIDDEN, NUM_LOCAL, dense, expert, layer_input
from frozen_frameworks import frozen
from frozen_vllm import (
    ActivationFormat,
    Delegate,
    NoOP,
    QuantConfig,
    make_moe_kernel,
    moe_config,
    moe_kernel_quantize_input,
    run_micro_batches,
    vllms_own_choice,
)

from comparison import largest_error
from fusco import Quantize
from fusco.core.quantization import dequantize_rows
from fusco.integrations import plugins

FP8, BLOCK = torch.float8_e4m3fn, 32
QUANTIZED = {
    "unquantised": QuantConfig(),
    "blocks": QuantConfig(FP8, block_shape=[BLOCK, BLOCK]),
    "tokens": QuantConfig(FP8, per_act_token_quant=True),
    "a given scale": QuantConfig(FP8, a1_scale=torch.tensor([0.01])),
    "a scale of what arrives": QuantConfig(FP8),
    "MXFP8": QuantConfig("mxfp8"),
    "MXFP8, scales as rows": QuantConfig("mxfp8", is_scale_swizzled=False),
    "NVFP4": QuantConfig("nvfp4", a1_gscale=torch.tensor(500.0)),
}
BACKENDS = ("allgather_reducescatter", "deepep_high_throughput", "deepep_low_latency")


def dequantized(rows: torch.Tensor, scales: torch.Tensor | None, config: QuantConfig, layout="row") -> torch.Tensor:
    """What quantised rows stand for, by scales as rows, or swizzled."""
    if scales is None:
        return rows
    if config.quant_dtype in ("mxfp8", "nvfp4"):
        kind = Quantize(config.quant_dtype, layout=layout, global_scale=1 / float(config.a1_gscale or 1))
        if layout == "swizzled":
            scales = scales.view(-(-len(rows) // 128) * 128, -1)
        return dequantize_rows(rows, scales.view(kind.scale_dtype), kind, torch.float32)
    return rows.float() * scales.repeat_interleave(rows.shape[-1] // scales.shape[-1], -1)


class FrozenExperts:
    """Experts of vLLM, which leave the weights to ``finalize``, or apply them."""

    is_delegating = True

    def __init__(self, moe, quant_config) -> None:
        self.quant_config = quant_config

    @staticmethod
    def activation_format() -> ActivationFormat:
        return ActivationFormat.Standard

    def reduction(self) -> object:
        return Delegate() if self.is_delegating else NoOP()

    def apply(self, rows, scales, ids, weights, expert_map, metadata) -> torch.Tensor:
        local = expert_map[ids[:, 0]]
        counts = torch.bincount(local[local >= 0], minlength=len(metadata.expert_num_tokens))
        assert counts.tolist() == metadata.expert_num_tokens.tolist()
        rows = dequantized(
            rows, scales, self.quant_config, "swizzled" if self.quant_config.is_scale_swizzled else "row"
        )
        y = torch.full(rows.shape, float("nan"))
        for row in (local >= 0).nonzero()[:, 0].tolist():
            y[row] = expert(rows[row], self.logical(int(ids[row, 0])))
        return y[:, None] if self.is_delegating else y * weights

    def logical(self, number: int) -> int:
        """The expert in a place: the same number, unless there are redundant ones."""
        return number


class WeighingExperts(FrozenExperts):
    is_delegating = False


class BatchedExperts(FrozenExperts):
    @staticmethod
    def activation_format() -> ActivationFormat:
        return ActivationFormat.BatchedExperts

    def apply(self, rows, scales, ids, weights, expert_map, metadata) -> torch.Tensor:
        assert ids is weights is None
        assert scales is None or (scales.ndim == 3 and len(scales) == len(rows))
        y = torch.full(rows.shape, float("nan"))
        for local, count in enumerate(metadata.expert_num_tokens.tolist()):
            scale = None if scales is None else scales[local][: count if scales.shape[1] > 1 else 1]
            number = int((expert_map == local).nonzero())
            y[local, :count] = expert(dequantized(rows[local, :count], scale, self.quant_config), number)
        return y


def expected_sums(x, ids, weights, config: QuantConfig) -> torch.Tensor:
    """Dense experts of the rows as they are quantised; of rows that are quantised where they arrive, unquantised."""
    if config.quant_dtype is None or config is QUANTIZED["a scale of what arrives"]:
        return dense(x, ids, weights)
    values, scales = moe_kernel_quantize_input(
        x,
        config.a1_scale if config.a1_gscale is None else config.a1_gscale,
        config.quant_dtype,
        config.per_act_token_quant,
        config.block_shape,
        is_scale_swizzled=False,
    )
    return dense(dequantized(values, scales, config), ids, weights)


def expert_map_of(placement: str, rank: int, size: int) -> torch.Tensor:
    """The local index of each expert, and -1 for those of other ranks."""
    num_experts = NUM_LOCAL * size
    here = range(rank * NUM_LOCAL, (rank + 1) * NUM_LOCAL)
    if placement == "round_robin":
        here = range(rank, num_experts, size)
    elif placement == "shuffled":
        drawn = torch.randperm(num_experts, generator=torch.Generator().manual_seed(7)).tolist()
        here = drawn[rank * NUM_LOCAL : (rank + 1) * NUM_LOCAL]
    expert_map = torch.full((num_experts,), -1, dtype=torch.int32)
    expert_map[torch.tensor(here)] = torch.arange(NUM_LOCAL, dtype=torch.int32)
    return expert_map


def vllm_layers(group: dist.ProcessGroup, backend: str, placement: str) -> dict[str, float]:
    """Largest errors of layers as vLLM makes them once plugins are loaded, by what quantises rows.

    Numbers of tokens differ, one rank has none, and steps are small enough for static rows, or not.
    """
    rank, size = group.rank(), group.size()
    num_experts, errors = NUM_LOCAL * size, {}
    expert_map = expert_map_of(placement, rank, size)
    kinds = (BatchedExperts,) if backend == "deepep_low_latency" else (FrozenExperts, WeighingExperts)
    with frozen(group), mock.patch.dict(os.environ, {"VLLM_PLUGINS": "other, fusco"}):
        from vllm import forward_context
        from vllm.model_executor.layers.fused_moe.oracle import fp8

        plugins.load_into_vllm()
        plugins.load_into_vllm()  # as processes do
        assert fp8.maybe_make_prepare_finalize is not vllms_own_choice
        for name, config in QUANTIZED.items():
            sent_as = config
            if backend == "deepep_low_latency" and config.quant_dtype in ("mxfp8", "nvfp4"):
                sent_as = QUANTIZED["unquantised"]  # experts of NVFP4 quantise themselves
                if config.quant_dtype == "mxfp8":  # refused
                    continue
            errors[name] = 0.0
            for kind in kinds:
                kernel = make_moe_kernel(fp8, moe_config(backend, num_experts), kind, config)
                for tokens in ([3 * r for r in range(size)], [5 + 30 * r for r in range(size)]):
                    forward_context.state.tokens = tokens
                    x, ids, weights = layer_input(rank, num_experts, tokens[rank])
                    out = kernel.apply(x, weights, ids, num_experts, expert_map)
                    error = largest_error(out, expected_sums(x, ids, weights, sent_as))
                    errors[name] = max(errors[name], error)
        kernel.prepare_finalize._rows.comms.abort()
    return errors


class RedundantExperts(FrozenExperts):
    """The experts that EPLB has put into physical ones."""

    physical_to_logical: ClassVar[list[int]] = []

    def logical(self, number: int) -> int:
        return self.physical_to_logical[number]


def vllm_rebalanced(group: dist.ProcessGroup, num_placements: int) -> float:
    """The largest error of a layer whose experts EPLB moves between steps; ids are physical, of any replica."""
    rank, size, largest = group.rank(), group.size(), 0.0
    num_physical, num_logical = NUM_LOCAL * size, NUM_LOCAL * size - size // 2
    expert_map, config = expert_map_of("linear", rank, size), QUANTIZED["unquantised"]
    with frozen(group), mock.patch.dict(os.environ, {"VLLM_PLUGINS": "fusco"}):
        from vllm import forward_context
        from vllm.model_executor.layers.fused_moe.oracle import fp8

        plugins.load_into_vllm()
        backend = moe_config("allgather_reducescatter", num_physical)
        kernel = make_moe_kernel(fp8, backend, RedundantExperts, config)
        for number in range(num_placements):
            random = np.random.default_rng(number)
            redundant = random.integers(0, num_logical, num_physical - num_logical)
            placed = random.permutation([*range(num_logical), *redundant])
            RedundantExperts.physical_to_logical = placed.tolist()
            forward_context.state.tokens = [7 + number] * size
            x, ids, weights = layer_input(rank, num_logical, 7 + number)
            replicas = [np.flatnonzero(placed == expert) for expert in range(num_logical)]
            physical = [[-1 if each < 0 else random.choice(replicas[each]) for each in row] for row in ids.tolist()]
            out = kernel.apply(x, weights, torch.tensor(physical), num_physical, expert_map)
            largest = max(largest, largest_error(out, expected_sums(x, ids, weights, config)))
        kernel.prepare_finalize._rows.comms.abort()
    return largest


def vllm_micro_batches(group: dist.ProcessGroup, backend: str) -> float:
    """The largest error of two micro-batches in a thread each, in two steps of two layers."""
    rank, size, largest = group.rank(), group.size(), 0.0
    num_experts = NUM_LOCAL * size
    expert_map = expert_map_of("linear", rank, size)
    kind = BatchedExperts if backend == "deepep_low_latency" else FrozenExperts
    with frozen(group), mock.patch.dict(os.environ, {"VLLM_PLUGINS": "fusco"}):
        from vllm.model_executor.layers.fused_moe.oracle import fp8

        plugins.load_into_vllm()
        config = QUANTIZED["unquantised"]
        kernels = [make_moe_kernel(fp8, moe_config(backend, num_experts), kind, config) for _ in range(2)]
        inputs = [layer_input(rank + 10 * number, num_experts, 4 + 2 * number) for number in range(2)]

        def layers(number: int) -> torch.Tensor:
            x, ids, weights = inputs[number]
            for kernel in kernels:
                x = kernel.apply(x, weights, ids, num_experts, expert_map)
            return x

        for _ in range(2):
            outs = run_micro_batches([lambda: layers(0), lambda: layers(1)])
            for out, (x, ids, weights) in zip(outs, inputs, strict=True):
                first = expected_sums(x, ids, weights, config)
                largest = max(largest, largest_error(out, expected_sums(first, ids, weights, config)))
        kernels[0].prepare_finalize._rows.comms.abort()
    return largest


def vllm_refusals(group: dist.ProcessGroup) -> list[str]:
    """Texts of errors; and what is made for layers that fusco leaves to vLLM."""
    with frozen(group):
        from fusco.integrations.vllm import FuscoBatchedPrepareAndFinalize, FuscoPrepareAndFinalize, _choosing_fusco

        choose = _choosing_fusco(vllms_own_choice)
        x, ids, weights = layer_input(0, 4, 2)
        plain, made = QuantConfig(), FuscoPrepareAndFinalize(group, 4)
        batched = FuscoBatchedPrepareAndFinalize(group, 4, max_tokens_per_rank=1)
        texts = [
            choose(moe_config("allgather_reducescatter", 4, is_distributed=False), plain),
            choose(moe_config("nixl_ep", 4), plain),
        ]
        twice = torch.tensor([0, 1, -1, -1])  # on both ranks
        for call in (
            lambda: choose(moe_config("allgather_reducescatter", 4), plain, use_monolithic=True),
            lambda: FuscoPrepareAndFinalize(group, 5),
            lambda: made.prepare(x, weights, ids, 4, None, False, QuantConfig("mxfp4"), False),
            lambda: batched.prepare(x, weights, ids, 4, None, False, QuantConfig("mxfp8"), False),
            lambda: made.prepare(x, weights, ids, 8, None, False, plain, False),
            lambda: made.prepare(x, weights, ids, 4, twice, False, plain, False),
            lambda: made.prepare(x, weights, ids, 4, None, True, plain, False),
            lambda: batched.prepare(x, weights, ids, 4, None, False, plain, False),
            lambda: made.finalize(x, x, weights, ids, False, Delegate()),
        ):
            try:
                call()
            except (ValueError, NotImplementedError) as error:
                texts.append(str(error))
        return texts


assert HIDDEN % BLOCK == 0
