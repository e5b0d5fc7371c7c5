"""Gradients: the mirror of dispatch is an unweighted combine, the mirror of combine a dispatch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from fusco.handle import Handle


@dataclass(frozen=True)
class Verbs:
    """The two movements without gradients, for an existing handle."""

    dispatch: Callable[[torch.Tensor, Handle], torch.Tensor]
    combine: Callable[[torch.Tensor, Handle], torch.Tensor]


@dataclass(frozen=True)
class Made:
    """Rows that a verb has made already. Wrapped, so that autograd sees a new tensor and not a view of an input."""

    rows: torch.Tensor


class DispatchRows(torch.autograd.Function):
    """Expert-major rows from token-major ones. ``grad_x[t]`` is the sum of the gradients of all copies of token t."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, made: Made, handle: Handle, verbs: Verbs) -> torch.Tensor:
        """Put what dispatch made of ``x`` into the graph."""
        ctx.handle, ctx.verbs, ctx.shape = handle.unweighted(), verbs, x.shape
        return made.rows

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_rows: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """An unweighted combine."""
        # With the width spelled out, as -1 means nothing for a rank without rows.
        flat = grad_rows.reshape(len(grad_rows), ctx.shape[1:].numel())
        grad_x = ctx.verbs.combine(flat, ctx.handle)
        return grad_x.view(ctx.shape), None, None, None


class RouteWeights(torch.autograd.Function):
    """The weight of each expert-major row, from ``topk_weights`` (num_tokens, num_topk)."""

    @staticmethod
    def forward(ctx: Any, topk_weights: torch.Tensor, handle: Handle, verbs: Verbs) -> torch.Tensor:
        """Padding rows have weight zero."""
        ctx.handle, ctx.verbs, ctx.dtype = handle.unweighted(), verbs, topk_weights.dtype
        return handle.plan.slot_weights.to(topk_weights.dtype, copy=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_routed: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Each row's gradient goes home to its token and k."""
        return _weights_home(grad_routed, ctx.handle, ctx.verbs).to(ctx.dtype), None, None


class CombineRows(torch.autograd.Function):
    """Token-major rows from expert-major ones, weighted if the handle has weights."""

    @staticmethod
    def forward(
        ctx: Any, y: torch.Tensor, topk_weights: torch.Tensor | None, made: Made, handle: Handle, verbs: Verbs
    ) -> torch.Tensor:
        """Put what combine made of ``y`` into the graph."""
        ctx.handle, ctx.verbs = handle, verbs
        ctx.save_for_backward(y if topk_weights is not None and topk_weights.requires_grad else None)
        return made.rows

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """``grad_y[slot] = weight * grad_out[t]`` and ``grad_weight[t, k] = grad_out[t] . y[slot]``."""
        (y,) = ctx.saved_tensors
        grad_y, grad_weights = gradients_of_combine(grad_out, y, ctx.handle, ctx.verbs)
        return grad_y, grad_weights, None, None, None


def gradients_of_combine(
    grad_out: torch.Tensor, y: torch.Tensor | None, handle: Handle, verbs: Verbs
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The gradients of ``y`` and, if ``y`` is given, of ``topk_weights``."""
    grad_y = verbs.dispatch(grad_out.contiguous(), handle)
    grad_weights = None
    if y is not None:
        assert handle.topk_weights is not None
        wide = torch.promote_types(y.dtype, torch.float32)
        dots = torch.linalg.vecdot(grad_y.to(wide), y.detach().to(wide))
        home = _weights_home(dots, handle.unweighted(), verbs)
        grad_weights = home.to(handle.topk_weights.dtype)
    if handle.is_weighted:
        # Multiplied in the wider dtype, so that weights are not rounded to 16 bits first.
        grad_y = (grad_y * handle.plan.slot_weights[:, None]).to(grad_y.dtype)
    return grad_y, grad_weights


def _weights_home(slot_values: torch.Tensor, handle: Handle, verbs: Verbs) -> torch.Tensor:
    """Send one value of each slot to its token: (num_tokens, num_topk), by combining rows of num_topk values."""
    dtype = torch.float64 if slot_values.dtype == torch.float64 else torch.float32
    rows = slot_values.new_zeros(handle.num_slots, handle.num_topk, dtype=dtype)
    rows.scatter_(1, handle.plan.slot_to_k[:, None], slot_values.to(dtype)[:, None])
    return verbs.combine(rows, handle)
