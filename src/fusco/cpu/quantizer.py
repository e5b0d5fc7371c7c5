"""Quantisation of rows on the CPU."""

from __future__ import annotations

import torch

from fusco.core.config import Launch
from fusco.core.quantization import Quantize, lay_out_scales


class CpuQuantizer:
    """Methods are those of ``fusco.engine.quantizer.Quantizer``, documented there."""

    def quantize(
        self,
        x: torch.Tensor,
        quantize: Quantize,
        launch: Launch | None = None,  # noqa: ARG002  has no effect on the CPU
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return tensors whose memory is never touched, so it costs nothing."""
        num_tokens, hidden = x.shape
        widths = quantize.widths(hidden)
        values = torch.empty(num_tokens, widths.values, dtype=quantize.value_dtype, device="cpu")
        scales = torch.empty(num_tokens, widths.scales, dtype=quantize.scale_dtype, device="cpu")
        return values, scales

    def lay_out(
        self,
        scales: torch.Tensor,
        quantize: Quantize,
        hidden: int,
        launch: Launch | None,  # noqa: ARG002  has no effect on the CPU
    ) -> tuple[torch.Tensor, None]:
        return lay_out_scales(scales, quantize, hidden), None
