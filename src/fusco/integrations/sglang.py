"""SGLang: a dispatcher for unquantised experts on fusco, through SGLang's hooks for plugins.

For SGLang 0.5 with ``--moe-a2a-backend deepep_v2``: ``SGLANG_PLUGINS=fusco`` loads it (see ``plugins``). No ``deep_ep``
is needed. Rows arrive by local expert, in blocks of a multiple of 128 rows, and go into DeepGEMM as they are. Sources
of the interface: ``sglang/srt/layers/moe/token_dispatcher/{base,deepep_v2}.py`` and ``sglang/srt/plugins`` (Apache
licence).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from sglang.srt.layers.moe.token_dispatcher.base import BaseDispatcher, CombineInputFormat
from sglang.srt.layers.moe.token_dispatcher.deepep_v2 import DeepEPv2DispatchOutput
from sglang.srt.layers.moe.utils import get_moe_a2a_backend
from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.runtime_context import get_parallel

from fusco.integrations.expert_rows import ExpertRows, SentRows, ends_in_blocks

_ALIGNMENT = 128  # of DeepGEMM's contiguous layout
_TARGET = "sglang.srt.layers.moe.fused_moe_triton.layer.create_moe_dispatcher"


class FuscoDispatcher(BaseDispatcher):
    """Dispatch and combine of expanded rows; the host waits once in a dispatch, so it is in no CUDA graph."""

    def __init__(self, group: dist.ProcessGroup, num_experts: int) -> None:
        super().__init__()
        self._rows = ExpertRows.of_group(group, num_experts)
        self._sent: SentRows | None = None

    def dispatch(self, hidden_states: torch.Tensor, topk_output: Any) -> Any:
        """Send tokens, bfloat16 (num_tokens, hidden), to their experts.

        ``topk_output`` has ``topk_ids``, -1 for no expert, and ``topk_weights`` (num_tokens, num_topk). Returns rows
        and weights by local expert, and the ends of the experts' rows: the start of a block, which is a multiple of
        128, and its number of rows.
        """
        with self._rows.comms.rejecting():
            ids, weights = topk_output.topk_ids, topk_output.topk_weights.float()
        sent = self._sent = self._rows.dispatch([hidden_states], ids, weights, expert_alignment=_ALIGNMENT)
        counts = sent.dispatched.num_rows_per_expert
        return DeepEPv2DispatchOutput(
            hidden_states=sent.dispatched.rows,
            hidden_states_scale=None,
            topk_ids=None,
            topk_weights=sent.dispatched.weights,
            psum_num_recv_tokens_per_expert=ends_in_blocks(counts, _ALIGNMENT),
            is_expanded=True,
            expert_alignment=_ALIGNMENT,
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


def make_dispatcher(original: Callable[..., Any], moe_runner_config: Any, quant_method: Any) -> Any:
    """Return fusco's dispatcher with ``--moe-a2a-backend deepep_v2``, and otherwise what SGLang makes."""
    if not get_moe_a2a_backend().is_deepep_v2():
        return original(moe_runner_config, quant_method)
    if not isinstance(quant_method, UnquantizedFusedMoEMethod):
        kind = type(quant_method).__name__
        raise NotImplementedError(f"fusco's SGLang adapter is for unquantised experts, not {kind}")
    return FuscoDispatcher(get_parallel().tp_group.device_group, moe_runner_config.num_experts)


@cache
def register() -> None:
    """Make SGLang ask ``make_dispatcher`` for dispatchers; a second call does nothing."""
    HookRegistry.register(_TARGET, make_dispatcher, HookType.AROUND)
