"""Parts of vLLM 0.33.0 that fusco's adapter uses, by its names and signatures; what runs does what vLLM does."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from fusco import Quantize
from reference.quantize_rows import quantize_rows

_FUSED_MOE = "vllm.model_executor.layers.fused_moe"
_LIMIT_S = 60.0


class FusedMoEPrepareAndFinalizeModular(ABC):
    """``vllm...modular_kernel``."""

    def post_init_setup(self, fused_experts: Any) -> None:
        return

    @property
    @abstractmethod
    def activation_format(self) -> Any: ...

    @abstractmethod
    def topk_indices_dtype(self) -> Any: ...

    @abstractmethod
    def max_num_tokens_per_rank(self) -> Any: ...

    @abstractmethod
    def num_dispatchers(self) -> Any: ...

    @abstractmethod
    def output_is_reduced(self) -> Any: ...

    def supports_async(self) -> bool:
        return False

    def supports_dbo(self) -> bool:
        return self.supports_async()

    @abstractmethod
    def prepare(
        self,
        a1,
        topk_weights,
        topk_ids,
        num_experts,
        expert_map,
        apply_router_weight_on_input,
        quant_config,
        defer_input_quant,
    ) -> Any: ...

    @abstractmethod
    def finalize(
        self, output, fused_expert_output, topk_weights, topk_ids, apply_router_weight_on_input, weight_and_reduce_impl
    ) -> None: ...


class ActivationFormat(Enum):
    Standard = ("standard",)
    BatchedExperts = ("batched_experts",)


@dataclass
class ExpertTokensMetadata:
    expert_num_tokens: torch.Tensor | None
    expert_num_tokens_cpu: torch.Tensor | None


class Delegate: ...


class NoOP: ...


@dataclass(frozen=True)
class QuantConfig:
    """``FusedMoEQuantConfig``, as far as rows are concerned."""

    quant_dtype: Any = None
    a1_scale: torch.Tensor | None = None
    per_act_token_quant: bool = False
    block_shape: list[int] | None = None
    a1_gscale: torch.Tensor | None = None
    is_scale_swizzled: bool = True
    mx_alignment: int = 0


class FusedMoEKernel:
    """Calls in the order of vLLM's kernel; experts get what ``prepare`` returns."""

    def __init__(self, prepare_finalize: Any, fused_experts: Any) -> None:
        self.prepare_finalize, self.fused_experts = prepare_finalize, fused_experts
        prepare_finalize.post_init_setup(fused_experts)
        assert prepare_finalize.activation_format == fused_experts.activation_format()
        assert not prepare_finalize.supports_async()

    def apply(self, x, topk_weights, topk_ids, num_experts, expert_map) -> torch.Tensor:
        experts, output = self.fused_experts, torch.full_like(x, float("nan"))
        assert topk_ids.dtype == self.prepare_finalize.topk_indices_dtype()
        assert not dbo_enabled() or self.prepare_finalize.supports_dbo()
        rows, scales, metadata, ids, weights = self.prepare_finalize.prepare(
            x, topk_weights, topk_ids, num_experts, expert_map, False, experts.quant_config, defer_input_quant=False
        )
        if (on_host := metadata.expert_num_tokens_cpu) is not None:
            assert metadata.expert_num_tokens.tolist() == on_host.tolist()
        y = experts.apply(rows, scales, ids, weights, expert_map, metadata)
        ids, weights = (topk_ids, topk_weights) if ids is None else (ids, weights)
        self.prepare_finalize.finalize(output, y, weights, ids, False, experts.reduction())
        return output


def moe_kernel_quantize_input(
    A,  # noqa: N803  its name
    A_scale,  # noqa: N803
    quant_dtype,
    per_act_token_quant,
    block_shape=None,
    is_scale_swizzled=True,
    mx_alignment=0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """MXFP8, NVFP4, or FP8 with a scale of each block, of each token, or of the tensor, given or not."""
    assert not is_scale_swizzled
    if quant_dtype == "mxfp8":
        assert A_scale is None
        values, scales = quantize_rows(A, Quantize("mxfp8"))
        return values, scales.view(torch.uint8)
    if quant_dtype == "nvfp4":
        return quantize_rows(A, Quantize("nvfp4", global_scale=1 / float(A_scale)))
    assert quant_dtype == torch.float8_e4m3fn
    width = block_shape[1] if block_shape else A.shape[-1]
    blocks = A.float().view(len(A), A.shape[-1] // width, width)
    scales = blocks.abs().amax(-1).clamp(min=1e-10) / 448
    if A_scale is not None:
        scales = A_scale
    elif not per_act_token_quant and not block_shape:
        scales = scales.max().reshape(1) if len(A) else torch.ones(1)
    return (blocks / (scales[..., None] if scales.ndim > 1 else scales)).view(A.shape).to(quant_dtype), scales


def normalize_batched_scales_shape(scales, num_experts) -> torch.Tensor | None:
    if scales is None or scales.ndim == 3:
        return scales
    if scales.numel() == 1:
        return scales.view(1, 1, 1).expand(num_experts, 1, 1)
    return scales.view(num_experts, -1, scales.shape[-1])


# The contexts of two micro-batches, by thread: its number, what it waits for, and what wakes the other up.
_CONTEXTS: dict[int, tuple[int, threading.Event, threading.Event]] = {}


def dbo_enabled() -> bool:
    return bool(_CONTEXTS)


def dbo_current_ubatch_id() -> int:
    return _CONTEXTS[threading.get_ident()][0] if _CONTEXTS else 0


def dbo_yield_and_switch_from_compute_to_comm() -> None:
    _, own, other = _CONTEXTS[threading.get_ident()]
    other.set()
    assert own.wait(_LIMIT_S)
    own.clear()


def dbo_switch_to_compute_sync() -> None: ...


def run_micro_batches(works: list[Callable[[], object]]) -> list[object]:
    """Run two functions in a thread each, of which one runs at a time, as vLLM's wrapper of micro-batches does."""
    results: list[object] = [None, None]
    events = [threading.Event(), threading.Event()]
    ready = threading.Barrier(3)

    def run(number: int) -> None:
        _CONTEXTS[threading.get_ident()] = (number, events[number], events[1 - number])
        ready.wait(_LIMIT_S)
        try:
            assert events[number].wait(_LIMIT_S)
            events[number].clear()
            results[number] = works[number]()
        except BaseException as error:  # noqa: BLE001  raised in the thread that waits
            results[number] = error
        events[1 - number].set()

    threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    ready.wait(_LIMIT_S)
    events[0].set()
    for thread in threads:
        thread.join(_LIMIT_S)
    _CONTEXTS.clear()
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def vllms_own_choice(moe, quant_config, routing_tables=None, allow_new_interface=False, **_: Any) -> Any:
    return "vLLM's own"


def moe_config(backend: str, num_experts: int, *, is_distributed: bool = True, max_num_tokens: int = 64) -> Any:
    """``FusedMoEConfig``, as far as what prepares experts is chosen by it."""
    parallel = SimpleNamespace(use_all2all_kernels=is_distributed, all2all_backend=backend, sp_size=1)
    return SimpleNamespace(moe_parallel_config=parallel, num_experts=num_experts, max_num_tokens=max_num_tokens)


def make_moe_kernel(oracle: Any, moe: Any, experts_cls: Any, quant_config: QuantConfig) -> FusedMoEKernel:
    """What vLLM's oracles do, in a module that has imported ``maybe_make_prepare_finalize``."""
    made = oracle.maybe_make_prepare_finalize(
        moe=moe, quant_config=quant_config, routing_tables=None, allow_new_interface=True, use_monolithic=False
    )
    return FusedMoEKernel(made, experts_cls(moe, quant_config))


def modules(group: dist.ProcessGroup) -> dict[str, dict[str, Any]]:
    """The attributes of each module."""
    sizes = SimpleNamespace(cudagraph_capture_sizes=[1, 2, 8])
    config = SimpleNamespace(compilation_config=sizes, model_config=SimpleNamespace(enforce_eager=False))
    state = SimpleNamespace(tokens=None)
    return {
        "vllm.config": {"get_current_vllm_config": lambda: config},
        "vllm.distributed": {"get_ep_group": lambda: SimpleNamespace(cpu_group=group)},
        "vllm.forward_context": {
            "state": state,
            "is_forward_context_available": lambda: state.tokens is not None,
            "get_forward_context": lambda: SimpleNamespace(
                dp_metadata=SimpleNamespace(num_tokens_across_dp_cpu=torch.tensor(state.tokens))
            ),
        },
        "vllm.v1.worker.ubatching": {
            each.__name__: each
            for each in (
                dbo_current_ubatch_id,
                dbo_enabled,
                dbo_switch_to_compute_sync,
                dbo_yield_and_switch_from_compute_to_comm,
            )
        },
        f"{_FUSED_MOE}.modular_kernel": {
            "FusedMoEPrepareAndFinalizeModular": FusedMoEPrepareAndFinalizeModular,
            "FusedMoEActivationFormat": ActivationFormat,
            "ExpertTokensMetadata": ExpertTokensMetadata,
        },
        f"{_FUSED_MOE}.topk_weight_and_reduce": {
            "TopKWeightAndReduceDelegate": Delegate,
            "TopKWeightAndReduceNoOP": NoOP,
        },
        f"{_FUSED_MOE}.utils": {
            "moe_kernel_quantize_input": moe_kernel_quantize_input,
            "normalize_batched_scales_shape": normalize_batched_scales_shape,
        },
        f"{_FUSED_MOE}.all2all_utils": {"maybe_make_prepare_finalize": vllms_own_choice},
        f"{_FUSED_MOE}.oracle.fp8": {"maybe_make_prepare_finalize": vllms_own_choice},
    }
