"""Quantised dispatches, a layer in front of the engine: rows become values and scales, two payloads of one routing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from fusco.api.handle import Dispatched, Handle
from fusco.api.validation import Validator
from fusco.core.config import Launch
from fusco.core.quantization import Quantize
from fusco.core.rows import wants_grad
from fusco.engine.quantizer import Origin, Quantizer


class QuantizedRows:
    """Rows of one dispatch that are sent as values and scales.

    Attributes:
        x: the caller's rows.
        payloads: values and scales, as rows.
        origin: what the payloads are of.
    """

    def __init__(self, quantizer: Quantizer, quantize: Quantize, x: torch.Tensor, launch: Launch | None) -> None:
        self._quantizer, self._quantize, self._launch = quantizer, quantize, launch
        self.x = x
        self.origin = Origin(x.detach(), quantize, _described(quantize, x))
        self.payloads = list(quantizer.quantize(self.origin.x, quantize, launch))

    def arrived(self, sent: Dispatched) -> Dispatched:
        """Return a dispatch of the payloads with scales in the layout that was asked for."""
        rows, scales = sent.payloads
        scales, event = self.laid_out(scales, sent.event)
        return replace(sent, payloads=(rows, scales), event=event, quantize=self._quantize, dtype=self.x.dtype)

    def laid_out(
        self, scales: torch.Tensor, event: torch.cuda.Event | None = None
    ) -> tuple[torch.Tensor, torch.cuda.Event | None]:
        """Return scales that arrived, in the layout that was asked for, and the event after them, or else ``event``."""
        if self._quantize.layout == "row":
            return scales, event
        return self._quantizer.lay_out(scales, self._quantize, self.x.shape[1], self._launch)

    def gradient_rows(self, sent: Dispatched) -> torch.Tensor:
        """Return zeros (num_rows, hidden) of the dtype of ``x``, one element in memory: what gradients arrive at."""
        shape = (*sent.rows.shape[:-1], self.x.shape[1])
        return torch.zeros((1,) * len(shape), dtype=self.x.dtype, device=self.x.device).expand(shape)


def quantized(
    quantizer: Quantizer,
    validator: Validator,
    payloads: Sequence[Any],
    quantize: Quantize,
    launch: Launch | None,
    handle: Handle | None = None,
) -> QuantizedRows:
    """Return the rows of a dispatch, quantised; raise for those that cannot be, before anything is launched.

    Those of a dispatch along a ``handle`` have no gradients.
    """
    validator.require_quantizable(payloads, quantize)
    if handle is not None:
        validator.require_handle(handle)
        if wants_grad(payloads[0]):
            raise ValueError(
                "x requires gradients, which rows quantised by dispatch_again have none of: pass x.detach()"
            )
    validator.require_launch(launch)
    return QuantizedRows(quantizer, quantize, payloads[0], launch)


def _described(quantize: Quantize, x: torch.Tensor) -> str:
    """Return what must be equal on all ranks beyond the dtypes and shapes of values and scales."""
    options = f"{quantize.format}, {quantize.rule}, {quantize.columns}, {quantize.global_scale}"
    return f"{options}, gradients of {x.dtype}" if wants_grad(x) else options
