"""vLLM's quantisation of activations: before rows travel, with scales of blocks or tokens; else where they arrive.

Scales of MXFP8 and NVFP4 travel as rows; experts that read them swizzled, in tiles of 128 rows, get them so afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.utils import moe_kernel_quantize_input, normalize_batched_scales_shape

from fusco.core.quantization import Quantize, lay_out_scales

_BLOCK_FORMATS = {name: Quantize(name, layout="swizzled") for name in ("mxfp8", "nvfp4")}


@dataclass(frozen=True)
class ArrivedRows:
    """Rows at their experts, in the standard or the batched format."""

    payloads: tuple[torch.Tensor, ...]  # values (..., hidden) and, if they travelled, scales (..., num_scales)
    has_token: torch.Tensor  # bool (...): others are undefined


@dataclass(frozen=True)
class Quantization:
    """What quantises the rows of a layer: nothing, vLLM before they travel, or vLLM where they arrive."""

    config: Any  # vLLM's ``FusedMoEQuantConfig``
    where: str  # "nowhere", "before" or "after"

    @classmethod
    def of(cls, config: Any, *, is_deferred: bool, is_batched: bool) -> Quantization:
        """Return the quantisation of a configuration; ``NotImplementedError`` for formats that cannot travel.

        A scale for a whole tensor that is not given depends on the rows, so it is computed where they arrive, as vLLM
        does with DeepEP. Batched experts of NVFP4 quantise themselves.
        """
        dtype = config.quant_dtype
        if dtype is None or is_deferred or (is_batched and dtype == "nvfp4"):
            return cls(config, "nowhere")
        if dtype in _BLOCK_FORMATS and not is_batched:
            return cls(config, "before")
        if not isinstance(dtype, torch.dtype):
            raise NotImplementedError(
                f"fusco's vLLM adapter moves FP8, INT8, MXFP8 (standard format) and NVFP4 rows, and unquantised ones, "
                f"not {dtype} in the {'batched' if is_batched else 'standard'} format"
            )
        is_of_tensor = config.block_shape is None and not config.per_act_token_quant
        return cls(config, "after" if is_of_tensor and config.a1_scale is None else "before")

    def before(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Return what travels for tokens (num_tokens, hidden): values, and the scales of blocks or tokens."""
        if self.where != "before":
            return [x]
        values, scales = self._quantize(x)
        is_known = self.config.a1_scale is not None and self.config.block_shape is None  # of the tensor, on all ranks
        return [values] if scales.numel() == 1 and is_known else [values, scales]

    def after(self, arrived: ArrivedRows, num_local_experts: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the rows that experts get and their scales, ``None`` if they are not quantised."""
        rows, *more = arrived.payloads
        scales: torch.Tensor | None = more[0] if more else None
        if self.where == "after" and rows.numel():
            known = rows.where(arrived.has_token[..., None], 0)  # rows without a token would change the scale
            rows, scales = self._quantize(known.flatten(0, -2))
            rows = rows.view(known.shape)
        elif self.where == "before" and not more:
            scales = self.config.a1_scale
        elif self.config.quant_dtype in _BLOCK_FORMATS and more and self.config.is_scale_swizzled:
            scales = lay_out_scales(more[0], _BLOCK_FORMATS[self.config.quant_dtype], rows.shape[-1])
            scales = scales.flatten() if self.config.quant_dtype == "mxfp8" else scales  # as vLLM's own functions do
        if rows.ndim == 3:
            scales = normalize_batched_scales_shape(scales, num_local_experts)
        return rows, scales

    @property
    def values_per_element(self) -> int:
        """Values in an element of what travels."""
        return 2 if self.where == "before" and self.config.quant_dtype == "nvfp4" else 1

    def _quantize(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        config = self.config
        values, scales = moe_kernel_quantize_input(
            x,
            config.a1_gscale if config.quant_dtype == "nvfp4" else config.a1_scale,
            quant_dtype=config.quant_dtype,
            per_act_token_quant=config.per_act_token_quant,
            block_shape=config.block_shape,
            is_scale_swizzled=False,
            mx_alignment=config.mx_alignment,
        )
        assert scales is not None
        return values, scales
