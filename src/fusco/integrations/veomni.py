"""VeOmni: an implementation of experts on fusco, in VeOmni's registry of kernels.

For VeOmni 0.1: call ``register()`` before the model is built, with ``moe_implementation: fused_fusco``. Models call
either the registered kernel or the function that ``apply_veomni_fused_moe_patch`` binds, whose docstring asks other
packages to wrap it for their name. Sources of the interface: ``veomni/ops/kernel_registry.py`` and
``veomni/ops/kernels/moe/__init__.py`` (Apache licence).
"""

from __future__ import annotations

from typing import Any

import torch
from veomni.distributed.parallel_state import get_parallel_state
from veomni.ops.kernel_registry import KERNEL_REGISTRY, HardwareRequirement, KernelSpec
from veomni.ops.kernels import moe

from fusco.core.config import FSDP_SMS, Launch
from fusco.fsdp.grouped_linear import grouped_linear
from fusco.integrations.expert_rows import ExpertRows

_NAME = "fusco"


def fused_moe_forward(
    num_experts: int,
    routing_weights: torch.Tensor,
    selected_experts: torch.Tensor,
    hidden_states: torch.Tensor,
    fc1_1_weight: torch.Tensor | None,
    fc1_2_weight: torch.Tensor | None,
    fc2_weight: torch.Tensor,
    fc1_1_2_weight: torch.Tensor | None = None,
    swiglu_limit: float | None = None,
) -> torch.Tensor:
    """Return the weighted sums of experts with SwiGLU; with gradients of tokens, weights and matrices.

    Hidden states are (..., hidden), of num_tokens rows; floating weights and int64 experts (num_tokens, num_topk). Of
    this rank's experts, ``fc1_1_2_weight`` has the gates and the other factors (num_local_experts, 2 * inner, hidden),
    or else ``fc1_1_weight`` and ``fc1_2_weight`` have them (num_local_experts, inner, hidden); ``fc2_weight`` is
    (num_local_experts, hidden, inner). ``swiglu_limit`` must be ``None``.
    """
    # As many SMs as under FSDP, whose collectives run at the same time.
    rows, launch = ExpertRows.of_group(get_parallel_state().ep_group, num_experts), Launch(num_sms=FSDP_SMS)
    with rows.comms.rejecting():
        if swiglu_limit is not None:
            raise NotImplementedError(f"fusco's experts have no swiglu_limit, got {swiglu_limit}")
        if fc1_1_2_weight is None:
            if fc1_1_weight is None or fc1_2_weight is None:
                raise ValueError("experts need fc1_1_2_weight, or fc1_1_weight and fc1_2_weight")
            fc1_1_2_weight = torch.cat([fc1_1_weight, fc1_2_weight], dim=1)
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
    sent = rows.dispatch([x], selected_experts, routing_weights, with_weights=False, launch=launch)
    counts, up, down = sent.dispatched.num_rows_per_expert, fc1_1_2_weight.mT, fc2_weight.mT
    sizes = sent.counts_on_host.tolist()
    gate, factor = grouped_linear(sent.dispatched.rows, up, None, counts, sizes).chunk(2, dim=-1)
    y = grouped_linear(torch.nn.functional.silu(gate) * factor, down, None, counts, sizes)
    return sent.combine([y], launch, "topk")[0].view(hidden_states.shape)


def register() -> None:
    """Register ``fused_fusco`` as an implementation of experts; a second call changes nothing."""
    KERNEL_REGISTRY.register(
        KernelSpec(
            name=_NAME,
            op_name="moe_experts",
            variant="standard",
            factory=lambda: _of_module,
            hardware=HardwareRequirement(device_type="any"),
            description="experts whose tokens move by fusco",
        ),
        force=True,
    )
    others = moe.apply_veomni_fused_moe_patch
    if getattr(others, "binds_fusco", False):
        return

    def bind(fused_moe_kernel: str = "triton") -> None:
        """Bind the function that models call, for fusco's name; others as before."""
        if fused_moe_kernel == _NAME:
            moe._fused_moe_forward = fused_moe_forward  # noqa: SLF001  what the wrapped function binds
        else:
            others(fused_moe_kernel)

    bind.binds_fusco = True  # type: ignore[attr-defined]
    moe.apply_veomni_fused_moe_patch = bind


def _of_module(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Return ``fused_moe_forward`` of a module of experts, as models call a registered kernel."""
    weights, limit = (None, None, module.down_proj, module.gate_up_proj), getattr(module, "limit", None)
    return fused_moe_forward(module.num_experts, top_k_weights, top_k_index, hidden_states, *weights, limit)
