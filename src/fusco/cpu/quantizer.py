"""Quantisation of rows on the CPU."""

from __future__ import annotations

import torch

from fusco.core.config import Launch
from fusco.core.quantization import Quantize, lay_out_scales
from fusco.core.rows import plain
from fusco.cpu.kernels.quantize_rows import quantize_rows


class CpuQuantizer:
    """Methods are those of ``fusco.engine.quantizer.Quantizer``, documented there."""

    def quantize(self, x: torch.Tensor, quantize: Quantize) -> tuple[torch.Tensor, torch.Tensor]:
        num_tokens, hidden = x.shape
        widths = quantize.widths(hidden)
        values = torch.empty(num_tokens, widths.values, dtype=quantize.value_dtype, device="cpu")
        scales = torch.empty(num_tokens, widths.scales, dtype=quantize.scale_dtype, device="cpu")
        quantize_rows(plain(x), quantize, values.view(torch.uint8), scales.view(torch.uint8))
        return values, scales

    def lay_out(
        self,
        scales: torch.Tensor,
        quantize: Quantize,
        hidden: int,
        launch: Launch | None,  # noqa: ARG002  has no effect on the CPU
    ) -> tuple[torch.Tensor, None]:
        return lay_out_scales(scales, quantize, hidden), None
