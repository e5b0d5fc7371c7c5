"""Quantisation of rows on the device."""

from __future__ import annotations

import torch

from fusco.core.config import Launch
from fusco.core.quantization import Quantize, lay_out_scales
from fusco.cuda.context import CudaContext
from fusco.cuda.kernels.quantize_rows import quantize_rows
from fusco.cuda.stream_order import StreamOrder

_DEFAULT_LAUNCH = Launch()


class CudaQuantizer:
    """Methods are those of ``fusco.engine.quantizer.Quantizer``, documented there."""

    def __init__(self, context: CudaContext, order: StreamOrder) -> None:
        self._context, self._order = context, order

    def quantize(
        self, x: torch.Tensor, quantize: Quantize, launch: Launch | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        num_tokens, hidden = x.shape
        widths = quantize.widths(hidden)
        with self._order.on_stream(launch or _DEFAULT_LAUNCH, x) as stream:
            values = x.new_empty(num_tokens, widths.values, dtype=quantize.value_dtype)
            scales = x.new_empty(num_tokens, widths.scales, dtype=quantize.scale_dtype)
            quantize_rows(self._context.launcher(stream), x, quantize, values, scales)
        return values, scales

    def lay_out(
        self, scales: torch.Tensor, quantize: Quantize, hidden: int, launch: Launch | None
    ) -> tuple[torch.Tensor, torch.cuda.Event | None]:
        launch = launch or _DEFAULT_LAUNCH
        with self._order.on_stream(launch, scales) as stream:
            laid_out = lay_out_scales(scales, quantize, hidden)
            return laid_out, self._order.hand_over([laid_out], launch, stream)
