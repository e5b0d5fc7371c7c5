"""SGLang's own dispatcher for DeepEP on ranks, with the ``deep_ep`` module; the experts are PyTorch's."""

# ruff: noqa: PLC0415  SGLang may not be installed

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import sys
from collections.abc import Iterator
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
from framework_jobs import (
    HIDDEN,
    NUM_EXPERTS,
    NUM_TOPK,
    dequantized,
    frameworks_on,
    inputs_of,
    relative,
    router_weights,
    sums_of_experts,
    what_is_missing,
    wide,
    wide_experts,
)
from frozen_frameworks import sglang_per_token_group_quant_fp8

BF16, BLOCK = torch.bfloat16, 128
# What SGLang imports and the dispatcher does not use: for GPUs, or large.
UNUSED = ("flashinfer", "outlines", "sgl_kernel", "torchao", "torchvision")


class _Unused(ModuleType):
    """A module that has every name."""

    __version__ = "0.28.0"
    __path__: tuple[str, ...] = ()

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return mock.MagicMock(name=name)


class _Finder(MetaPathFinder, Loader):
    """Finds modules of ``UNUSED``, whether they are installed or not."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname.split(".", maxsplit=1)[0] in UNUSED else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Unused(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


@contextlib.contextmanager
def without_unused() -> Iterator[None]:
    version = importlib.metadata.version
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    with mock.patch.object(
        importlib.metadata, "version", lambda name: _Unused.__version__ if name in UNUSED else version(name)
    ):
        yield
    sys.meta_path.remove(finder)


def dispatcher_layers(group: dist.ProcessGroup, mode: str, *, is_fp8: bool) -> list[float] | str:
    """Errors of layers, of which the last has no tokens on rank 1; or what is missing to run SGLang in this mode.

    ``mode`` is one of SGLang's ``DeepEPMode``; with ``"AUTO"`` each layer is computed as a prefill and as a decode
    step, and then as two micro-batches of a decode step, of which one is sent before the other is computed.
    """
    environment = mock.patch.dict(os.environ, {"SGLANG_DEEPEP_BF16_DISPATCH": str(int(not is_fp8))})
    a_gpu = SimpleNamespace(multi_processor_count=132)
    properties = mock.patch.object(torch.cuda, "get_device_properties", return_value=a_gpu)
    with environment, properties, frameworks_on("cpu"), without_unused():
        try:
            import sglang.srt.layers.moe.token_dispatcher.deepep as module
            from sglang.srt.layers.moe import utils
        except ModuleNotFoundError as missing:
            return f"SGLang cannot be imported: {what_is_missing(missing)}"
        assert module.use_deepep, module._deepep_import_error
        has_gemm = mock.patch.object(module.deep_gemm_wrapper, "ENABLE_JIT_DEEPGEMM", new=True)
        quantizes = mock.patch.object(module, sglang_per_token_group_quant_fp8.__name__, _quantize, create=True)
        with has_gemm, quantizes, mock.patch.object(utils, "get_server_args", return_value=None):
            made = [_dispatcher(module, group, utils.DeepEPMode[mode]) for _ in range(2)]
            errors = []
            for step in range(3):
                for is_prefill in (True, False) if mode == "AUTO" else (mode == "NORMAL",):
                    with mock.patch.object(module, "get_is_extend_in_batch", return_value=is_prefill):
                        errors += _layers(module, made[:1], group, step, is_fp8=is_fp8)
            if mode == "AUTO":
                with mock.patch.object(module, "get_is_extend_in_batch", return_value=False):
                    errors += _layers(module, made, group, 1, is_fp8=is_fp8)
            return errors


def _dispatcher(module, group: dist.ProcessGroup, mode):
    return module.DeepEPDispatcher(
        group,
        NUM_TOPK,
        num_experts=NUM_EXPERTS,
        num_local_experts=NUM_EXPERTS // group.size(),
        hidden_size=2 * HIDDEN,
        params_dtype=BF16,
        deepep_mode=mode,
        async_finish=True,
        return_recv_hook=True,
    )


def _layers(module, dispatchers, group: dist.ProcessGroup, step: int, *, is_fp8: bool) -> list[float]:
    """Errors of a layer for each dispatcher, all of which send before the first computes."""
    from sglang.srt.layers.moe.topk import StandardTopKOutput

    x = inputs_of(group.rank(), min(step, 1))[0].to(BF16)
    x = x[: 0 if step == 2 and group.rank() else len(x)]
    parts = x.chunk(len(dispatchers)) if len(dispatchers) > 1 else [x]
    expected = []
    for made, part in zip(dispatchers, parts, strict=True):
        weights, ids = torch.softmax(part.float() @ router_weights().T, -1).topk(NUM_TOPK)
        made.dispatch_a(wide(part), StandardTopKOutput(weights, ids, weights))
        rows = dequantized(*_quantize(wide(part), BLOCK)) if is_fp8 else wide(part)
        expected.append(sums_of_experts(rows.float(), ids, weights, wide_experts()))
    for made in dispatchers:
        sent = made.dispatch_b()
        is_masked = hasattr(sent, "masked_m")
        assert (sent.hidden_states.dtype == torch.float8_e4m3fn) == is_fp8
        kind = module.DeepEPLLCombineInput if is_masked else module.DeepEPNormalCombineInput
        y = _masked_experts(sent, group) if is_masked else _experts(sent, group)
        made.combine_a(kind(y, sent.topk_ids, sent.topk_weights))
    outs = [made.combine_b() for made in dispatchers]
    assert [(out.shape, out.dtype) for out in outs] == [(each.shape, BF16) for each in expected]
    return relative(outs, expected) if len(x) else [0.0] * len(outs)


def _quantize(x: torch.Tensor, group_size: int, **_: bool) -> tuple[torch.Tensor, torch.Tensor]:
    return sglang_per_token_group_quant_fp8(x, group_size)


def _experts(sent, group: dist.ProcessGroup) -> torch.Tensor:
    """What this rank's experts return; counts of rows are multiples of 128, for DeepGEMM."""
    num_local = NUM_EXPERTS // group.size()
    counts = torch.bincount(sent.topk_ids[sent.topk_ids >= 0], minlength=num_local)
    assert [-(-count // 128) * 128 for count in counts.tolist()] == sent.num_recv_tokens_per_expert
    experts = wide_experts()[group.rank() * num_local :][:num_local]
    rows = dequantized(sent.hidden_states, sent.hidden_states_scale)
    return sums_of_experts(rows, sent.topk_ids, sent.topk_weights, experts)


def _masked_experts(sent, group: dist.ProcessGroup) -> torch.Tensor:
    """What this rank's experts return for masked rows, without weights; others are undefined."""
    num_local = NUM_EXPERTS // group.size()
    rows = dequantized(sent.hidden_states, sent.hidden_states_scale)
    y = torch.full_like(rows, float("nan"))
    for local, count in enumerate(sent.masked_m.tolist()):
        up, down = wide_experts()[group.rank() * num_local + local]
        y[local, :count] = torch.nn.functional.gelu(rows[local, :count] @ up.T) @ down.T
    return y
