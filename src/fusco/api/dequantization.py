"""Rows that values and scales stand for, with gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from fusco.core.quantization import Quantize, dequantize_rows


class DequantizeRows(torch.autograd.Function):
    """Rows (num_rows, hidden) of ``dtype`` that values and scales stand for, as ``dequantize_rows``.

    Gradients go straight through to ``Dispatched.gradients``, of the same shape and dtype.
    """

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ARG004  nothing is kept
        gradients: torch.Tensor,  # noqa: ARG004  an input for its gradient alone
        values: torch.Tensor,
        scales: torch.Tensor,
        quantize: Quantize,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """Dequantise."""
        return dequantize_rows(values, scales, quantize, dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_rows: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # noqa: ARG004
        """Pass the gradient on."""
        return grad_rows, None, None, None, None
