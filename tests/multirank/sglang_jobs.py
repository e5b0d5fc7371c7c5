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
    bf16_error,
    expert_weights,
    frameworks_on,
    inputs_of,
    router_weights,
    sums_of_experts,
)

BF16 = torch.bfloat16
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
def _without_unused() -> Iterator[None]:
    version = importlib.metadata.version
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    with mock.patch.object(
        importlib.metadata, "version", lambda name: _Unused.__version__ if name in UNUSED else version(name)
    ):
        yield
    sys.meta_path.remove(finder)


def dispatcher_layers(group: dist.ProcessGroup) -> list[float] | str:
    """Errors of three layers, of which the last has no tokens on rank 1; or what is missing to import SGLang."""
    environment = mock.patch.dict(os.environ, {"SGLANG_DEEPEP_BF16_DISPATCH": "1"})
    a_gpu = SimpleNamespace(multi_processor_count=132)
    properties = mock.patch.object(torch.cuda, "get_device_properties", return_value=a_gpu)
    with environment, properties, frameworks_on("cpu"), _without_unused():
        try:
            import sglang.srt.layers.moe.token_dispatcher.deepep as module
            from sglang.srt.layers.moe import utils
            from sglang.srt.layers.moe.topk import StandardTopKOutput
        except ModuleNotFoundError as missing:
            if str(missing.name).partition(".")[0] in ("deep_ep", "fusco"):
                raise
            return str(missing)
        assert module.use_deepep, module._deepep_import_error
        has_gemm = mock.patch.object(module.deep_gemm_wrapper, "ENABLE_JIT_DEEPGEMM", new=True)
        with has_gemm, mock.patch.object(utils, "get_server_args", return_value=None):
            made = module.DeepEPDispatcher(
                group,
                NUM_TOPK,
                num_experts=NUM_EXPERTS,
                num_local_experts=NUM_EXPERTS // group.size(),
                hidden_size=HIDDEN,
                params_dtype=BF16,
                deepep_mode=utils.DeepEPMode.NORMAL,
                async_finish=True,
            )
            errors = []
            for step in range(3):
                x = inputs_of(group.rank(), min(step, 1))[0].to(BF16)
                x = x[: 0 if step == 2 and group.rank() else len(x)]
                weights, ids = torch.softmax(x.float() @ router_weights().T, -1).topk(NUM_TOPK)
                sent = made.dispatch(x, StandardTopKOutput(weights, ids, weights))
                y = _experts(sent, group)
                out = made.combine(module.DeepEPNormalCombineInput(y, sent.topk_ids, sent.topk_weights))
                errors.append(bf16_error(out, x, router_weights()))
            return errors


def _experts(sent, group: dist.ProcessGroup) -> torch.Tensor:
    """What this rank's experts return; counts of rows are multiples of 128, for DeepGEMM."""
    num_local = NUM_EXPERTS // group.size()
    counts = torch.bincount(sent.topk_ids[sent.topk_ids >= 0], minlength=num_local)
    assert [-(-count // 128) * 128 for count in counts.tolist()] == sent.num_recv_tokens_per_expert
    experts = expert_weights()[group.rank() * num_local :][:num_local]
    return sums_of_experts(sent.hidden_states, sent.topk_ids, sent.topk_weights, experts)
