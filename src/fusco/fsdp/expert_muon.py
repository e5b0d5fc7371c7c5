"""Muon for stacks of matrices: each expert's matrix is orthogonalised by itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fusco.fsdp.mesh import local_values

_EPS = 1e-7  # the smallest norm that a matrix is divided by, as in PyTorch
_ADJUSTMENTS = (None, "original", "match_rms_adamw")


class ExpertMuon(torch.optim.Optimizer):
    """``torch.optim.Muon`` (https://kellerjordan.github.io/posts/muon/) for parameters of three dimensions.

    Each matrix of a stack (num_experts, rows, columns) is updated as ``torch.optim.Muon`` updates a parameter (rows,
    columns), up to the rounding of its bfloat16 products. With ``Sharding(expert_dim=0)`` a rank has whole matrices, so
    the step needs no communication. Give matrices that are not experts' to ``torch.optim.Muon``.

    Args:
        params: parameters of three dimensions, plain or of a parallelized model.
        lr: learning rate.
        weight_decay: decoupled, as in AdamW.
        momentum: of the gradients.
        nesterov: whether to use Nesterov momentum.
        ns_coefficients: of the Newton-Schulz iteration.
        ns_steps: iterations.
        adjust_lr_fn: how the learning rate depends on a matrix's shape: ``"original"``, which is the default, or
            ``"match_rms_adamw"``.

    Raises:
        ValueError: for an unknown ``adjust_lr_fn``, a parameter that has not three dimensions, and one of which a rank
            has only parts of matrices (``Sharding(expert_dim=1)``).
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        *,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
    ) -> None:
        if adjust_lr_fn not in _ADJUSTMENTS:
            raise ValueError(f"adjust_lr_fn must be one of {_ADJUSTMENTS}, got {adjust_lr_fn!r}")
        defaults: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov}
        defaults |= {"ns_coefficients": ns_coefficients, "ns_steps": ns_steps, "adjust_lr_fn": adjust_lr_fn}
        super().__init__(params, defaults)
        for group in self.param_groups:
            for parameter in group["params"]:
                _check_stack(parameter)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient; return the closure's result."""
        with torch.enable_grad():
            loss = closure() if closure else None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)
        return loss

    def _update(self, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        values, grad, average = map(local_values, (parameter, gradient, state["momentum_buffer"]))
        average.lerp_(grad, 1 - group["momentum"])
        update = grad.lerp(average, group["momentum"]) if group["nesterov"] else average
        update = orthogonalize(update, group["ns_coefficients"], group["ns_steps"])
        num_rows, num_columns = values.shape[1:]
        if group["adjust_lr_fn"] == "match_rms_adamw":
            ratio = 0.2 * math.sqrt(max(num_rows, num_columns))
        else:
            ratio = math.sqrt(max(1, num_rows / num_columns))
        values.mul_(1 - group["lr"] * group["weight_decay"])
        values.add_(update.to(values.dtype), alpha=-group["lr"] * ratio)


def orthogonalize(stack: torch.Tensor, coefficients: tuple[float, float, float], num_steps: int) -> torch.Tensor:
    """Return each matrix of a stack with its singular values near 1: Newton-Schulz iterations in bfloat16.

    ``stack`` is (num_matrices, rows, columns); the result is bfloat16 of the same shape.
    """
    a, b, c = coefficients
    x = stack.bfloat16()
    is_tall = x.shape[1] > x.shape[2]
    x = x.mT if is_tall else x
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=_EPS)
    for _ in range(num_steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


def _check_stack(parameter: torch.Tensor) -> None:
    if parameter.ndim != 3:
        raise ValueError(
            f"ExpertMuon takes parameters of three dimensions, got one of shape {tuple(parameter.shape)}: "
            f"torch.optim.Muon takes matrices"
        )
    placements = parameter.placements if isinstance(parameter, DTensor) else ()
    if any(each.is_partial() or getattr(each, "dim", 0) for each in placements):
        raise ValueError(
            f"a rank has parts of the matrices of a parameter of shape {tuple(parameter.shape)} ({placements}): "
            f"parallelize with Sharding(expert_dim=0), so that ExpertMuon finds whole ones"
        )
