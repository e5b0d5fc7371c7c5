"""SGLang's own classes for DeepEP's second version on ranks, with the ``deep_ep`` module; the experts are PyTorch's."""

from __future__ import annotations

import importlib
import os
import sys
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from adapter_jobs import NUM_LOCAL, NUM_TOPK, dense, expert, experts_in_blocks, layer_input
from framework_jobs import frameworks_on, relative, what_is_missing
from frozen_frameworks import sglang_per_token_group_quant_fp8
from sglang_jobs import without_unused

from fusco import Quantize
from fusco.core.quantization import dequantize_rows

BF16, WIDTH, MAX_TOKENS = torch.bfloat16, 128, 64


def layers(group: dist.ProcessGroup, kind: Quantize | None, *, is_expanded: bool) -> list[float] | str:
    """Errors of prefills and decode steps, one of each without tokens on rank 0; or what is missing to run SGLang.

    Rows of prefills arrive by source rank, unless ``is_expanded``.
    """
    variables = {
        "FUSCO_ELASTIC_BUFFER": "1",
        "SGLANG_DEEPEP_V2_NUM_MAX_DISPATCH_TOKENS_PER_RANK": str(MAX_TOKENS),
        "SGLANG_DEEPEP_V2_ENABLE_PREFILL_EXPAND": str(int(is_expanded)),
    }
    with mock.patch.dict(os.environ, variables), frameworks_on("cpu"), without_unused():
        try:
            module = _with_second_version("sglang.srt.layers.moe.token_dispatcher.deepep_v2")
        except ModuleNotFoundError as missing:
            return f"SGLang cannot be imported: {what_is_missing(missing)}"
        assert module.use_deepep_v2, module._deepep_v2_import_error
        is_ue8m0 = kind is not None and kind.scale == "ue8m0"
        resources, errors = SimpleNamespace(buffers={}), []
        replaced = {
            "get_exec": lambda: SimpleNamespace(moe=SimpleNamespace(deepep_v2_mode="direct")),
            "get_parallel": lambda: SimpleNamespace(attn_dp_size=group.size()),
            "get_resources": lambda: resources,
            "get_deepep_v2_fp8_scale_format": lambda: module.DeepEPv2Fp8ScaleFormat(is_ue8m0, is_ue8m0),
            "sglang_per_token_group_quant_fp8": sglang_per_token_group_quant_fp8,
        }
        with mock.patch.multiple(module, **replaced):
            made = module.DeepEPv2Dispatcher(
                group, NUM_TOPK, NUM_LOCAL * group.size(), NUM_LOCAL, WIDTH, BF16, use_fp8_dispatch=kind is not None
            )
            for is_prefill, num_tokens in ((True, 4), (False, 3), (True, 0), (False, 0), (True, 60), (False, 64)):
                given = num_tokens if num_tokens > 4 or group.rank() else 0
                with mock.patch.object(module, "get_is_extend_in_batch", return_value=is_prefill):
                    errors.append(_layer(module, made, group, given, kind))
            made._impl._get_buffer().destroy()
        return errors


def _with_second_version(name: str) -> ModuleType:
    """Return a module of SGLang that has found the second version; what is imported later finds the first."""
    first = {each: sys.modules.pop(each) for each in [*sys.modules] if each.partition(".")[0] == "deep_ep"}
    try:
        return importlib.reload(importlib.import_module(name))
    finally:
        for each in [*sys.modules]:
            if each.partition(".")[0] == "deep_ep":
                del sys.modules[each]
        sys.modules.update(first)


def _layer(module: Any, made: Any, group: dist.ProcessGroup, num_tokens: int, kind: Quantize | None) -> float:
    x, ids, weights = layer_input(group.rank(), NUM_LOCAL * group.size(), num_tokens, WIDTH)
    x, is_prefill = x.to(BF16), module.get_is_extend_in_batch()
    sent = made.dispatch(x, SimpleNamespace(topk_ids=ids, topk_weights=weights))
    assert sent.use_masked_gemm is not is_prefill
    assert (sent.hidden_states.dtype == torch.float8_e4m3fn) == (kind is not None)
    experts = list(range(group.rank() * NUM_LOCAL, (group.rank() + 1) * NUM_LOCAL))
    if sent.is_expanded:
        y = experts_in_blocks(sent, experts, kind or Quantize(), is_static=not is_prefill).to(BF16)
    else:
        y = _experts_of_tokens(sent, experts, kind).to(BF16)
    out = made.combine(module.DeepEPv2CombineInput(y, None))
    assert (out.shape, out.dtype) == (x.shape, BF16)
    if kind is not None:
        is_ue8m0 = kind.scale == "ue8m0"
        x = dequantize_rows(
            *sglang_per_token_group_quant_fp8(x, WIDTH, 1e-10, is_ue8m0, is_ue8m0, is_ue8m0), kind, torch.float32
        )
    return relative([out], [dense(x.float(), ids, weights)])[0] if num_tokens else 0.0


def _experts_of_tokens(sent: Any, experts: list[int], kind: Quantize | None) -> torch.Tensor:
    """Weighted sums of this rank's experts for each row, which has its token's local experts and weights."""
    rows = sent.hidden_states.float()
    if kind is not None:
        rows = dequantize_rows(sent.hidden_states, sent.hidden_states_scale, kind, torch.float32)
    y = torch.zeros_like(rows)
    for local, number in enumerate(experts):
        row, k = (sent.topk_ids == local).nonzero(as_tuple=True)
        y.index_add_(0, row, expert(rows[row], number) * sent.topk_weights[row, k][:, None])
    return y
