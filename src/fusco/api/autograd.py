"""Gradients: backward of dispatch is an unweighted combine, of combine a dispatch, of all-to-all its reverse."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from fusco.api.handle import Handle, without_weights
from fusco.cuda.kernels.weight_gradients import weight_gradients_on_cuda


@dataclass(frozen=True)
class Verbs:
    """Dispatch and combine without gradients, for an existing handle.

    Rows are (num_rows, width) here, even those of a masked output, but for the result of ``dispatch``.
    """

    dispatch: Callable[[torch.Tensor, Handle], torch.Tensor]
    combine: Callable[[torch.Tensor, Handle], torch.Tensor]
    combine_all: Callable[[Sequence[torch.Tensor], Handle], Sequence[torch.Tensor]]


@dataclass(frozen=True)
class Precomputed:
    """Results of a verb that has run already. Wrapped, so that autograd sees new tensors and not views of an input."""

    rows: torch.Tensor  # what the verb returns
    weights: torch.Tensor | None = None  # of a dispatch, the weight of each row, if requested


class DispatchRows(torch.autograd.Function):
    """Expert-major rows from token-major ones, and the weight of each row from those of the tokens.

    ``grad_x[t]`` is the sum of the gradients of all copies of token t. The gradient of a row's weight goes to the row's
    token and k. One function computes both, as the backward pass communicates: all ranks must do so in the same order,
    which autograd does not guarantee for two functions.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, topk_weights: torch.Tensor | None, made: Precomputed, handle: Handle, verbs: Verbs
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Record the rows of a dispatch, and their weights unless ``topk_weights`` is ``None``."""
        ctx.handle, ctx.verbs, ctx.shape = without_weights(handle), verbs, x.shape
        ctx.set_materialize_grads(False)  # unused outputs are not communicated
        weights = None
        if topk_weights is not None:
            ctx.dtype, weights = topk_weights.dtype, made.weights
        needs_rows, needs_weights, *_ = ctx.needs_input_grad
        constant = [] if needs_rows else [made.rows]
        if weights is not None and not needs_weights:
            constant.append(weights)
        ctx.mark_non_differentiable(*constant)
        return made.rows, weights

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_rows: torch.Tensor | None, grad_row_weights: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        """Combine the gradients of rows, and those of their weights, without weights."""
        parts = []
        if grad_rows is not None and ctx.needs_input_grad[0]:
            # Not with -1 for the width, which is ambiguous for a rank without rows.
            rows = grad_rows.reshape(ctx.handle.num_rows, ctx.shape[1:].numel())
            parts.append(torch.view_as_real(rows.resolve_conj()).flatten(1) if rows.is_complex() else rows)
        if grad_row_weights is not None and ctx.needs_input_grad[1]:
            parts.append(rows_of_weights(grad_row_weights.reshape(-1), ctx.handle))
        if len(parts) == 1:
            sums = [ctx.verbs.combine(parts[0], ctx.handle)]
        else:
            sums = list(ctx.verbs.combine_all(parts, ctx.handle)) if parts else []
        grad_x = None
        if grad_rows is not None and ctx.needs_input_grad[0]:
            grad_x = sums.pop(0)
            grad_x = torch.view_as_complex(grad_x.view(*ctx.shape, 2)) if rows.is_complex() else grad_x.view(ctx.shape)
        grad_weights = sums.pop().to(ctx.dtype) if sums else None
        return grad_x, grad_weights, None, None, None


class CombineRows(torch.autograd.Function):
    """Token-major rows from expert-major ones, weighted if the handle has weights."""

    @staticmethod
    def forward(
        ctx: Any, y: torch.Tensor, topk_weights: torch.Tensor | None, made: Precomputed, handle: Handle, verbs: Verbs
    ) -> torch.Tensor:
        """Record the rows of a combine."""
        ctx.handle, ctx.verbs, ctx.shape = handle, verbs, y.shape
        ctx.save_for_backward(y if topk_weights is not None and topk_weights.requires_grad else None)
        return made.rows

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """``grad_y[slot] = weight * grad_out[t]`` and ``grad_weight[t, k] = grad_out[t] . y[slot]``.

        ``grad_y`` has the shape of ``y``.
        """
        (y,) = ctx.saved_tensors
        grad_y, grad_weights = gradients_of_combine(grad_out, y, ctx.handle, ctx.verbs)
        return grad_y.view(ctx.shape), grad_weights, None, None, None


class ExchangeRows(torch.autograd.Function):
    """Rows by source rank from rows by destination rank. The reverse is an exchange that has gradients, too."""

    @staticmethod
    def forward(
        ctx: Any, input_: torch.Tensor, made: Precomputed, way_back: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """Record the rows of an exchange."""
        ctx.way_back = way_back
        return made.rows

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Send each row's gradient to the rank that the row came from."""
        return ctx.way_back(grad_output), None, None


def gradients_of_combine(
    grad_out: torch.Tensor, y: torch.Tensor | None, handle: Handle, verbs: Verbs
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the gradients of ``y`` and, if ``y`` is given, of ``topk_weights``."""
    grad_y = verbs.dispatch(grad_out.contiguous(), handle)
    if handle.topk_weights is None:
        assert y is None
        return grad_y, None
    y = None if y is None else _flat(y.detach())
    dots = weight_gradients(_flat(grad_y), y, handle.plan.slot_weights)
    if dots is None:
        return grad_y, None
    grad_weights = verbs.combine(rows_of_weights(dots, handle), without_weights(handle))
    return grad_y, grad_weights.to(handle.topk_weights.dtype)


def _flat(rows: torch.Tensor) -> torch.Tensor:
    """Return rows (num_rows, hidden) of those, or of masked ones; a view of contiguous ones."""
    return rows if rows.ndim == 2 else rows.flatten(0, 1)


def rows_of_weights(slot_values: torch.Tensor, handle: Handle) -> torch.Tensor:
    """Return one value of each slot as rows of num_topk values, all zero but one: their sums are those of the tokens.

    Their dtype is float32, or float64 for float64 values.
    """
    dtype = torch.float64 if slot_values.dtype == torch.float64 else torch.float32
    rows = slot_values.new_zeros(handle.num_rows, handle.num_topk, dtype=dtype)
    return rows.scatter_(1, handle.plan.slot_to_k[:, None], slot_values.to(dtype)[:, None])


def weights_of_slots(of_rows: torch.Tensor, handle: Handle) -> torch.Tensor:
    """Return the weight of each row, in their shape, of all weights of its token (..., num_topk)."""
    return of_rows.gather(-1, handle.plan.slot_to_k.view(*handle.rows_shape, 1)).squeeze(-1)


_ROWS_AT_ONCE = 512  # on the CPU: few enough for a cache, many enough for a PyTorch call


def weight_gradients(grads: torch.Tensor, rows: torch.Tensor | None, weights: torch.Tensor) -> torch.Tensor | None:
    """Return the dot product of ``grads[i]`` and ``rows[i]``, then multiply ``grads[i]`` by ``weights[i]``, in place.

    Products are rounded from float32, or from float64 if rows or weights are float64. No temporary is as large as the
    rows: widening 16-bit rows all at once would take twice their memory, each time.

    Args:
        grads: float16, bfloat16, float32 or float64 (num_rows, hidden), contiguous.
        rows: of the same dtype and shape, or ``None`` for no dot products.
        weights: float32 or float64 (num_rows,), contiguous.

    Returns:
        The dot products, float32 (num_rows,), float64 for float64 rows; ``None`` without rows.

    On CUDA this launches one kernel on the current stream; the host does not wait.

    >>> grads = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    >>> weight_gradients(grads, torch.tensor([[1.0, 1.0], [0.0, 2.0]]), torch.tensor([10.0, 0.5]))
    tensor([3., 8.])
    >>> grads
    tensor([[10.0000, 20.0000],
            [ 1.5000,  2.0000]])
    """
    if grads.is_cuda:
        return weight_gradients_on_cuda(grads, rows, weights)
    dots = None if rows is None else rows.new_empty(len(rows), dtype=torch.promote_types(rows.dtype, torch.float32))
    with torch.autocast("cpu", enabled=False):  # which would round the factors of dot products
        for first in range(0, len(grads), _ROWS_AT_ONCE):
            run = slice(first, first + _ROWS_AT_ONCE)
            if rows is not None and dots is not None:
                dots[run] = torch.linalg.vecdot(grads[run].to(dots.dtype), rows[run].to(dots.dtype))
            grads[run].mul_(weights[run, None])  # weights are not rounded to 16 bits first
    return dots
