"""Parts of vLLM 0.33.0, SGLang 0.5.23, VeOmni 0.1.12, torchtitan 0.3.0 and CollectiveX that adapters use.

Names, signatures and registries are facts of those versions. What runs here does what the frameworks do between the
calls of an adapter.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar, NamedTuple
from unittest import mock

import frozen_vllm
import torch
import torch.distributed as dist

import fusco.integrations
from fusco import Quantize
from fusco.core.quantization import lay_out_scales
from reference.quantize_rows import quantize_rows

_SGLANG_MOE = "sglang.srt.layers.moe"
MAX_DECODE_TOKENS = 48


class BaseDispatcher(ABC):
    """``sglang...token_dispatcher.base``."""

    def __init__(self) -> None:
        self.quant_config: dict = {}

    @abstractmethod
    def dispatch(self, hidden_states, topk_output) -> Any: ...

    @abstractmethod
    def combine(self, combine_input) -> Any: ...


class CombineInputFormat(Enum):
    STANDARD = "standard"
    DEEPEP_V2 = "deepep_v2"


class DeepEPv2DispatchOutput(NamedTuple):
    hidden_states: torch.Tensor
    hidden_states_scale: torch.Tensor | None
    topk_ids: torch.Tensor | None
    topk_weights: torch.Tensor
    psum_num_recv_tokens_per_expert: torch.Tensor | None = None
    is_expanded: bool = False
    use_masked_gemm: bool = False
    expected_m: int = 0
    masked_max_m: int = 0
    total_expanded: int = 0
    expert_alignment: int = 128
    activation_scale_block_size: int = 128


class DeepEPv2CombineInput(NamedTuple):
    hidden_states: torch.Tensor
    topk_weights: torch.Tensor | None
    routewise_layout: Any = None
    format: Any = CombineInputFormat.DEEPEP_V2


class SGLangUnquantizedMethod: ...


@dataclass(frozen=True)
class SGLangFp8Method:
    use_mxfp8: bool = False
    is_ue8m0: bool = False  # of the device, in SGLang


def sglang_per_token_group_quant_fp8(
    x, group_size, eps=1e-10, column_major_scales=False, scale_tma_aligned=False, scale_ue8m0=False
) -> tuple[torch.Tensor, torch.Tensor]:
    assert column_major_scales == scale_tma_aligned == scale_ue8m0
    if scale_ue8m0:
        quantize = Quantize(block=group_size, scale="ue8m0", layout="tma")
        values, scales = quantize_rows(x, quantize)
        return values, lay_out_scales(scales, quantize, x.shape[1])
    blocks = x.float().view(len(x), x.shape[1] // group_size, group_size)
    scales = blocks.abs().amax(-1).clamp(min=1e-10) / 448
    return (blocks / scales[..., None]).view(x.shape).to(torch.float8_e4m3fn), scales


class HookType(Enum):
    AROUND = "around"


class HookRegistry:
    hooks: ClassVar[dict[str, list]] = defaultdict(list)

    @classmethod
    def register(cls, target: str, hook: Any, hook_type: HookType) -> None:
        cls.hooks[target].append((hook_type, hook))


class KernelSpec(NamedTuple):
    """``veomni.ops.kernel_registry``."""

    name: str
    op_name: str
    variant: str
    factory: Any
    hardware: Any
    description: str = ""


class KernelRegistry:
    def __init__(self) -> None:
        self.specs: dict[tuple[str, str, str], KernelSpec] = {}

    def register(self, spec: KernelSpec, force=False) -> None:
        key = (spec.op_name, spec.variant, spec.name)
        assert force or key not in self.specs, "Duplicate kernel registration"
        self.specs[key] = spec

    def resolve(self, op_name: str, variant: str, impl_name: str) -> Any:
        return self.specs[op_name, variant, impl_name].factory()


def apply_veomni_fused_moe_patch(fused_moe_kernel: str = "triton") -> None:
    raise ValueError(f"Invalid fused_moe_kernel: {fused_moe_kernel!r}")


class EPDispatcher:
    """torchtitan's base of dispatchers, which layers make from a configuration."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        num_experts: int
        top_k: int

    def __init__(self, config: Config) -> None:
        self.num_experts, self.top_k = config.num_experts, config.top_k
        self.ep_mesh: Any = None

    def wire_meshes(self, *, ep_mesh: Any) -> None:
        self.ep_mesh = ep_mesh
        self.init_buffer()

    def init_buffer(self) -> None: ...


class SelectiveAC:
    @dataclass(kw_only=True, slots=True)
    class Config: ...


def override(*, target: type, exact: bool, description: str) -> Any:
    return lambda factory: factory


def derive(source: Any, target_cls: type, **deltas: Any) -> Any:
    return target_cls(num_experts=source.num_experts, top_k=source.top_k, **deltas)


class EPBackend:
    """CollectiveX's base of backends, as far as one overrides or calls it."""

    stage_device_work = False
    receive_layout, combine_weight_semantics = "token-rank", "unweighted-rank-sum"

    def __init__(self, args, rank, world_size, local_rank, device) -> None:
        self.args, self.rank, self.world_size, self.local_rank, self.device = args, rank, world_size, local_rank, device
        self.mode, self.precision = args.mode, args.precision

    def finalize(self, rc: int) -> int:
        return rc


def _modules(group: dist.ProcessGroup, a2a_backend: str) -> dict[str, dict[str, Any]]:
    veomni_state = SimpleNamespace(ep_group=group)
    parallel = SimpleNamespace(tp_group=SimpleNamespace(device_group=group))
    backend = SimpleNamespace(is_deepep_v2=lambda: a2a_backend == "deepep_v2")
    return {
        **frozen_vllm.modules(group),
        f"{_SGLANG_MOE}.token_dispatcher.base": {
            "BaseDispatcher": BaseDispatcher,
            "CombineInputFormat": CombineInputFormat,
        },
        f"{_SGLANG_MOE}.token_dispatcher.deepep_v2": {"DeepEPv2DispatchOutput": DeepEPv2DispatchOutput},
        f"{_SGLANG_MOE}.utils": {
            "get_moe_a2a_backend": lambda: backend,
            "get_deepep_v2_fp8_scale_format": lambda: scale_format,
            "scale_format": (scale_format := SimpleNamespace(ue8m0=False)),
        },
        "sglang.srt.environ": {
            "envs": SimpleNamespace(
                SGLANG_DEEPEP_V2_NUM_MAX_DISPATCH_TOKENS_PER_RANK=SimpleNamespace(get=lambda: MAX_DECODE_TOKENS)
            )
        },
        "sglang.srt.layers.dp_attention": {
            "state": (state := SimpleNamespace(is_extend=True)),
            "get_is_extend_in_batch": lambda: state.is_extend,
        },
        "sglang.kernels.ops.quantization.fp8_kernel": {
            "sglang_per_token_group_quant_fp8": sglang_per_token_group_quant_fp8
        },
        "sglang.srt.layers.quantization.unquant": {"UnquantizedFusedMoEMethod": SGLangUnquantizedMethod},
        "sglang.srt.plugins.hook_registry": {"HookRegistry": HookRegistry, "HookType": HookType},
        "sglang.srt.runtime_context": {"get_parallel": lambda: parallel},
        "veomni.distributed.parallel_state": {"get_parallel_state": lambda: veomni_state},
        "veomni.ops.kernel_registry": {
            "KERNEL_REGISTRY": KernelRegistry(),
            "KernelSpec": KernelSpec,
            "HardwareRequirement": lambda device_type: device_type,
        },
        "veomni.ops.kernels.moe": {"apply_veomni_fused_moe_patch": apply_veomni_fused_moe_patch},
        "ep_backend": {"EPBackend": EPBackend},
        "torchtitan.config.override": {"derive": derive, "override": override},
        "torchtitan.distributed.activation_checkpoint": {"SelectiveAC": SelectiveAC},
        "torchtitan.models.common.token_dispatcher": {
            "AllToAllTokenDispatcher": EPDispatcher,
            "BaseEPTokenDispatcher": EPDispatcher,
        },
    }


@contextmanager
def frozen(group: dist.ProcessGroup, a2a_backend: str = "deepep_v2") -> Iterator[None]:
    """Let adapters import these parts as the frameworks' modules."""
    made: dict[str, ModuleType] = {}
    for name, attributes in _modules(group, a2a_backend).items():
        parts = name.split(".")
        for length in range(1, len(parts) + 1):
            path = ".".join(parts[:length])
            made.setdefault(path, ModuleType(path))
            if length > 1:
                setattr(made[".".join(parts[: length - 1])], parts[length - 1], made[path])
        vars(made[name]).update(attributes)
    HookRegistry.hooks.clear()
    with mock.patch.dict(sys.modules, made):
        _forget_adapters()
        yield
        _forget_adapters()


def _forget_adapters() -> None:
    for name in ("vllm", "vllm_quantization", "sglang", "veomni", "torchtitan"):
        sys.modules.pop(f"fusco.integrations.{name}", None)
        vars(fusco.integrations).pop(name, None)
