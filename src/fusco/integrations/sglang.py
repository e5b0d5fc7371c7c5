"""SGLang: a dispatcher for unquantised and FP8 experts on fusco, through SGLang's hooks for plugins.

For SGLang 0.5 with ``--moe-a2a-backend deepep_v2``: ``SGLANG_PLUGINS=fusco`` loads it (see ``plugins``). No ``deep_ep``
is needed. Rows arrive by local expert, in blocks of a multiple of 128 rows: those of a prefill go into DeepGEMM as they
are, those of a decode step have a fixed size, and SGLang copies them to masked rows. Sources of the interface:
``sglang/srt/layers/moe/token_dispatcher/{base,deepep_v2}.py``, ``sglang/srt/layers/moe/moe_runner/deep_gemm.py`` and
``sglang/srt/plugins`` (Apache licence).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from sglang.srt.environ import envs
from sglang.srt.layers.dp_attention import get_is_extend_in_batch
from sglang.srt.layers.moe.token_dispatcher.base import BaseDispatcher, CombineInputFormat
from sglang.srt.layers.moe.token_dispatcher.deepep_v2 import DeepEPv2DispatchOutput
from sglang.srt.layers.moe.utils import get_deepep_v2_fp8_scale_format, get_moe_a2a_backend
from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.runtime_context import get_parallel

from fusco.core.config import RoutingSizes, StaticRows
from fusco.integrations.deep_ep.ep_buffer import tma_aligned
from fusco.integrations.expert_rows import ExpertRows, SentRows, ends_in_blocks

_ALIGNMENT = 128  # of DeepGEMM's contiguous layout
_BLOCK, _MX_BLOCK = 128, 32  # FP8 values that share a scale
_TARGET = "sglang.srt.layers.moe.fused_moe_triton.layer.create_moe_dispatcher"


class FuscoDispatcher(BaseDispatcher):
    """Dispatch and combine of expanded rows.

    A decode step has as many rows as any routing of ``max_decode_tokens`` on each rank needs, so that the host does not
    wait and a CUDA graph can have it; in a prefill the host waits once, for the number of rows.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        num_experts: int,
        *,
        fp8_block: int | None = None,
        is_ue8m0: bool = False,
        max_decode_tokens: int = 128,
    ) -> None:
        """Nothing is allocated before the first call.

        ``fp8_block``: rows travel as e4m3, with a scale of as many values, in float32 or, with ``is_ue8m0``, as
        exponents, four in an int32.
        """
        super().__init__()
        self._num_ranks, self._num_experts = dist.get_world_size(group), num_experts
        self._fp8_block, self._is_ue8m0, self._max_decode_tokens = fp8_block, is_ue8m0, max_decode_tokens
        self._rows = ExpertRows.of_group(group, num_experts)
        self._sent: SentRows | None = None

    def dispatch(self, hidden_states: torch.Tensor, topk_output: Any) -> Any:
        """Send tokens, bfloat16 (num_tokens, hidden), to their experts.

        ``topk_output`` has ``topk_ids``, -1 for no expert, and ``topk_weights`` (num_tokens, num_topk). Returns rows,
        with FP8 their scales float32 (num_rows, hidden / block), or int32 (num_rows, hidden / block / 4) in columns as
        DeepGEMM reads them, and weights by local expert, and the ends of the experts' rows: the start of a block, which
        is a multiple of 128, and its number of rows.
        """
        is_decode = not get_is_extend_in_batch()
        with self._rows.comms.rejecting():
            ids, weights = topk_output.topk_ids, topk_output.topk_weights.float()
            static = self._static_rows(len(hidden_states), ids.shape[1]) if is_decode else None
            payloads = self._quantize(hidden_states) if self._fp8_block else [hidden_states]
        sent = self._sent = self._rows.dispatch(payloads, ids, weights, expert_alignment=_ALIGNMENT, static=static)
        rows, *scales = sent.dispatched.payloads
        num_pairs = self._num_ranks * ids.numel()
        of_decode = {
            "use_masked_gemm": True,
            "expected_m": max(1, (num_pairs + self._num_experts) // self._num_experts),  # DeepGEMM's hint
            "masked_max_m": self._num_ranks * self._max_decode_tokens,
            "total_expanded": len(rows),
        }
        return DeepEPv2DispatchOutput(
            hidden_states=rows,
            hidden_states_scale=(tma_aligned(scales[0]) if self._is_ue8m0 else scales[0]) if scales else None,
            topk_ids=None,
            topk_weights=sent.dispatched.weights,
            psum_num_recv_tokens_per_expert=ends_in_blocks(sent.dispatched.num_rows_per_expert, _ALIGNMENT),
            is_expanded=True,
            expert_alignment=_ALIGNMENT,
            activation_scale_block_size=self._fp8_block or _BLOCK,
            **(of_decode if is_decode else {}),
        )

    def combine(self, combine_input: Any) -> torch.Tensor:
        """Return the sums of each token's rows, to which experts have applied the weights."""
        with self._rows.comms.rejecting():
            if combine_input.format != CombineInputFormat.DEEPEP_V2 or combine_input.routewise_layout is not None:
                raise ValueError(f"fusco combines weighted rows of DeepEP's second version, got {combine_input.format}")
            if self._sent is None:
                raise ValueError("combine needs a dispatch before it")
            sent, self._sent = self._sent, None
        return sent.combine([combine_input.hidden_states])[0]

    def _static_rows(self, num_tokens: int, num_topk: int) -> StaticRows:
        if num_tokens > self._max_decode_tokens:
            raise ValueError(
                f"a decode step of {num_tokens} tokens on a rank, more than the {self._max_decode_tokens} of "
                f"SGLANG_DEEPEP_V2_NUM_MAX_DISPATCH_TOKENS_PER_RANK"
            )
        sizes = RoutingSizes(
            max_tokens_per_rank=self._max_decode_tokens,
            world_size=self._num_ranks,
            num_topk=num_topk,
            num_experts=self._num_experts,
        )
        return StaticRows.for_rank_load(sizes, expert_alignment=_ALIGNMENT)

    def _quantize(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Return e4m3 values of tokens (num_tokens, hidden) and their scales, by SGLang's kernel."""
        from sglang.kernels.ops.quantization.fp8_kernel import (  # noqa: PLC0415  compiled, and for FP8 only
            sglang_per_token_group_quant_fp8,
        )

        # Exponents are packed only in columns.
        layout = dict.fromkeys(("column_major_scales", "scale_tma_aligned", "scale_ue8m0"), self._is_ue8m0)
        return [each.contiguous() for each in sglang_per_token_group_quant_fp8(x, self._fp8_block, **layout)]


def make_dispatcher(original: Callable[..., Any], moe_runner_config: Any, quant_method: Any) -> Any:
    """Return fusco's dispatcher with ``--moe-a2a-backend deepep_v2``, and otherwise what SGLang makes.

    What is not unquantised there has FP8 experts with scales of blocks of 128, or of 32 (MXFP8).
    """
    if not get_moe_a2a_backend().is_deepep_v2():
        return original(moe_runner_config, quant_method)
    is_fp8 = not isinstance(quant_method, UnquantizedFusedMoEMethod)
    block = _MX_BLOCK if getattr(quant_method, "use_mxfp8", False) else _BLOCK
    return FuscoDispatcher(
        get_parallel().tp_group.device_group,
        moe_runner_config.num_experts,
        fp8_block=block if is_fp8 else None,
        is_ue8m0=is_fp8 and get_deepep_v2_fp8_scale_format().ue8m0,
        max_decode_tokens=envs.SGLANG_DEEPEP_V2_NUM_MAX_DISPATCH_TOKENS_PER_RANK.get(),
    )


@cache
def register() -> None:
    """Make SGLang ask ``make_dispatcher`` for dispatchers; a second call does nothing."""
    HookRegistry.register(_TARGET, make_dispatcher, HookType.AROUND)
