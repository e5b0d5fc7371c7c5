"""PyTorch twin of ``quantize_rows``: values and scales of blocks of columns, written from the formats' definitions.

Every operation is PyTorch's on the CPU, in float32: divisions are correctly rounded there.
"""

from __future__ import annotations

import torch

from fusco import Quantize

_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def quantize_rows(x: torch.Tensor, quantize: Quantize) -> tuple[torch.Tensor, torch.Tensor]:
    """Return values and scales (num_rows, ...) in the dtypes of ``quantize``, scales as rows."""
    blocks = x.float().view(len(x), x.shape[1] // quantize.columns, quantize.columns)
    amax = blocks.abs().amax(dim=-1) if x.numel() else blocks.new_zeros(blocks.shape[:2])
    if quantize.format == "nvfp4":
        return _nvfp4(blocks, amax, quantize.global_scale)
    if quantize.format == "mxfp8":
        exponent = _mx_exponent(amax, is_ceil=quantize.rounding == "ceil")
        inverse = torch.where(exponent == 255, float("nan"), torch.exp2(127 - exponent.double()).float())
        return _e4m3(blocks * inverse[..., None]), exponent.to(torch.uint8).view(torch.float8_e8m0fnu)
    amax = amax.clamp(1e-4)
    if quantize.scale == "float32":
        return _e4m3(blocks * (1.0 / (amax / 448.0))[..., None]), amax / 448.0
    exponent = _ceiled(amax / 448.0).clamp(1, 254)
    scale = torch.exp2(exponent.double() - 127).float()
    values = _e4m3(blocks * (1.0 / scale)[..., None])
    return values, exponent.to(torch.uint8).view(torch.float8_e8m0fnu) if quantize.scale == "ue8m0" else scale


def _e4m3(blocks: torch.Tensor) -> torch.Tensor:
    """Return rows of float8_e4m3fn; clamped, as PyTorch before 2.13 turns what is too large into NaN."""
    codes = blocks.clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
    return torch.where(blocks.isnan(), 0x7F, codes.view(torch.uint8)).view(torch.float8_e4m3fn).flatten(1)


def _ceiled(scale: torch.Tensor) -> torch.Tensor:
    """Return the biased exponent of the power of two that is not below a scale; 0 is 2**-127."""
    exponent = torch.frexp(scale.double()).exponent - 1  # the power of two that is not above it
    is_above = scale.double() > torch.exp2(exponent.double())
    biased = torch.where(scale > 2.0**-127, exponent + is_above + 127, 0)
    return torch.where(scale.isfinite(), biased, 255)


def _mx_exponent(amax: torch.Tensor, *, is_ceil: bool) -> torch.Tensor:
    """Return the biased exponent of a block's scale; 255 is NaN."""
    if is_ceil:
        return torch.where(amax.isfinite(), _ceiled(amax * (1.0 / 448.0)), 255)
    exponent = torch.frexp(amax.double()).exponent - 1
    floored = torch.where(amax < 2.0**-126, -127, exponent)  # zero, and subnormal ones
    return torch.where(amax.isfinite(), (floored - 8).clamp(-127, 127) + 127, 255)


def _nvfp4(blocks: torch.Tensor, amax: torch.Tensor, global_scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    given = torch.tensor(global_scale, dtype=torch.float32)
    scales = (amax / 6.0 / given).clamp(2**-6, 448.0).to(torch.float8_e4m3fn)
    scaled = blocks * ((1.0 / given) / scales.float())[..., None]
    distance = (scaled.abs()[..., None] - _E2M1).abs()  # exact where two values are equally near
    near = distance.argmin(dim=-1)
    above = (near + 1).clamp(max=7)
    is_tie = distance.gather(-1, near[..., None]) == distance.gather(-1, above[..., None])
    codes = torch.where(is_tie[..., 0] & (near % 2 == 1), above, near)  # argmin is the lower one; ties go to the even
    codes = torch.where(scaled.abs() >= 6.0, 7, codes)
    codes = torch.where(scaled.isnan(), 7, codes + 8 * scaled.signbit()).to(torch.uint8).flatten(1)
    return codes[:, ::2] | codes[:, 1::2] << 4, scales
