"""Formats of rows in the low-latency mode: what DeepEP's arguments ask for, and the form in which it returns them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fusco.core.quantization import Quantize
from fusco.integrations.deep_ep.base import Rows

_TILE_ROWS, _TILE_COLUMNS = 128, 4  # of NVFP4 scales; a tile has 32 x 4 rows


def fp8_format(round_scale: bool, use_ue8m0: bool) -> Quantize:
    """Return the format of ``use_fp8``."""
    if use_ue8m0 and not round_scale:
        raise ValueError("use_ue8m0=True needs round_scale=True: exponents are those of powers of two")
    return Quantize(scale="ue8m0" if use_ue8m0 else "power-of-two" if round_scale else "float32", layout="tma")


def nvfp4_rows(
    x: torch.Tensor, x_global_scale: torch.Tensor | None, use_fp8: bool, use_ue8m0_for_sf: bool
) -> tuple[torch.Tensor, Quantize]:
    """Return rows times the caller's scale, float32, and the format of ``use_nvfp4``: the scale stays on its device."""
    if use_fp8:
        raise ValueError("use_fp8=True and use_nvfp4=True exclude each other: rows have one format")
    if use_ue8m0_for_sf:
        raise NotImplementedError("fusco's NVFP4 rows have scales of e4m3, not of ue8m0: use_ue8m0_for_sf=True")
    if x_global_scale is None or x_global_scale.numel() != 1:
        given = x_global_scale if x_global_scale is None else f"shape {tuple(x_global_scale.shape)}"
        raise ValueError(f"use_nvfp4=True needs x_global_scale of one element, got {given}")
    return x.float() * x_global_scale, Quantize("nvfp4", layout="swizzled")


def as_deep_ep_returns(payloads: Sequence[torch.Tensor], quantize: Quantize | None) -> Rows:
    """Return masked rows, or rows and scales; those of NVFP4 as views (R * T, H / 2, E / R) and (32, 4, ..., E / R)."""
    if quantize is None:
        return payloads[0]
    rows, scales = payloads
    if quantize.format != "nvfp4":
        return rows, scales
    num_local, num_rows, num_columns = scales.shape
    tiles = scales.view(num_local, num_rows // _TILE_ROWS, num_columns // _TILE_COLUMNS, 32, 4, _TILE_COLUMNS)
    return rows.permute(1, 2, 0), tiles.permute(3, 4, 1, 5, 2, 0)
