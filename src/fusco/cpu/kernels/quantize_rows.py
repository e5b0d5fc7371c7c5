"""Quantise rows with a scale for each block of columns; see ``fusco.core.quantization``.

All arithmetic is in float32, each operation rounded.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import carray  # type: ignore[attr-defined]  # not in its list of exports

from fusco.core.compiled import compiled
from fusco.core.quantization import E2M1_MAX, E4M3_MAX, Quantize
from fusco.cpu.kernels.intrinsics import bits_of, e2m1_code, e4m3_code, float_of, larger_magnitude, pointer_to, widen
from fusco.cpu.kernels.reduce_rows import as_array

AMAX, POWER_OF_TWO, MX_FLOOR, MX_CEIL, NVFP4 = range(5)
_RULES = {"amax": AMAX, "power-of-two": POWER_OF_TWO, "mx-floor": MX_FLOOR, "mx-ceil": MX_CEIL, "nvfp4": NVFP4}

_LEAST_AMAX, _E4M3_MAX, _E4M3_INVERSE = np.float32(1e-4), np.float32(E4M3_MAX), np.float32(1 / E4M3_MAX)
_E2M1_MAX, _LEAST_E4M3_SCALE = np.float32(E2M1_MAX), np.float32(2**-6)
_INFINITY, _MANTISSA, _ONE = np.uint32(0x7F800000), np.uint32(0x7FFFFF), np.float32(1)


def quantize_rows(x: torch.Tensor, quantize: Quantize, values: torch.Tensor, scales: torch.Tensor) -> None:
    """Write the values of each row, and its scales.

    Args:
        x: bfloat16, float16 or float32 (num_rows, hidden), contiguous; ``hidden`` is a multiple of the block.
        quantize: the format.
        values: uint8 (num_rows, bytes of values), rows contiguous.
        scales: uint8 (num_rows, bytes of scales), rows contiguous, at multiples of 4 bytes if they are float32.

    >>> x = torch.tensor([[448.0, -3.0, 0.3] + [0.0] * 29])
    >>> values, scales = torch.zeros(1, 32, dtype=torch.uint8), torch.zeros(1, 4, dtype=torch.uint8)
    >>> quantize_rows(x, Quantize(block=32), values, scales)
    >>> values.view(torch.float8_e4m3fn).float()[0, :4].tolist(), scales.view(torch.float32).tolist()
    ([448.0, -3.0, 0.3125, 0.0], [[1.0]])
    """
    assert x.shape[1] % quantize.columns == 0, (x.shape, quantize.columns)
    assert len(values) == len(scales) == len(x), (values.shape, scales.shape, x.shape)
    widths = quantize.widths(x.shape[1])
    scale_bytes = quantize.scale_dtype.itemsize
    assert values.shape[1] == widths.values, (values.shape, widths)
    assert scales.shape[1] == widths.scales * scale_bytes, (scales.shape, widths)
    to = np.array([values.data_ptr(), values.stride(0), scales.data_ptr(), scales.stride(0)], np.int64)
    shape = _RULES[quantize.rule], quantize.columns, scale_bytes
    _quantize_rows(as_array(x), shape, np.float32(quantize.global_scale), to)


@compiled(nogil=True, error_model="numpy")
def _quantize_rows(rows: Any, shape: Any, global_scale: Any, to: Any) -> None:
    rule, block, scale_bytes = shape
    num_blocks = rows.shape[1] // block
    for i in range(len(rows)):
        values = carray(pointer_to(to[0] + i * to[1]), (rows.shape[1],), np.uint8)
        bytes_of_scales = carray(pointer_to(to[2] + i * to[3]), (num_blocks,), np.uint8)
        words_of_scales = carray(pointer_to(to[2] + i * to[3]), (num_blocks,), np.uint32)
        for j in range(num_blocks):
            columns = rows[i, j * block : (j + 1) * block]
            scale, factor = _scale_of(rule, _largest(columns), global_scale)
            if scale_bytes == 4:
                words_of_scales[j] = scale << np.uint32(23) if rule == POWER_OF_TWO else scale
            else:
                bytes_of_scales[j] = scale
            if rule == NVFP4:
                _to_e2m1(columns, factor, values[j * (block // 2) :])
            else:
                _to_e4m3(columns, factor, values[j * block :])


@compiled(nogil=True)
def _largest(columns: Any) -> Any:
    """Return the largest absolute value; NaN if there is one, as bits of NaN are above those of infinity."""
    largest = np.uint32(0)
    for h in range(columns.size):
        largest = larger_magnitude(largest, widen(columns[h]))
    return float_of(largest)


@compiled(nogil=True, error_model="numpy")
def _scale_of(rule: int, amax: Any, global_scale: Any) -> Any:
    """Return the bits of a block's scale, and what its columns are multiplied by.

    Bits are those of float32 for ``AMAX``, of e4m3 for ``NVFP4``, else an exponent.
    """
    if rule == AMAX:
        amax = _LEAST_AMAX if amax < _LEAST_AMAX else amax
        scale = amax / _E4M3_MAX
        return bits_of(scale), _ONE / scale
    if rule == POWER_OF_TWO:
        amax = _LEAST_AMAX if amax < _LEAST_AMAX else amax
        exponent = min(max(_exponent_above(amax / _E4M3_MAX), np.uint32(1)), np.uint32(254))
        return exponent, _ONE / float_of(exponent << np.uint32(23))
    if rule == NVFP4:
        wanted = (amax / _E2M1_MAX) / global_scale
        wanted = _LEAST_E4M3_SCALE if wanted < _LEAST_E4M3_SCALE else wanted
        scale = np.uint32(e4m3_code(wanted))
        if scale == np.uint32(0x7F):
            return scale, float_of(_INFINITY | np.uint32(1))
        return scale, (_ONE / global_scale) / float_of((scale << np.uint32(20)) + (np.uint32(120) << np.uint32(23)))
    bits: Any = bits_of(amax)
    if bits >= _INFINITY:
        return np.uint32(0xFF), float_of(_INFINITY | np.uint32(1))
    if rule == MX_CEIL:
        exponent = _exponent_above(amax * _E4M3_INVERSE)
    else:
        of_amax = bits >> np.uint32(23)
        exponent = of_amax - np.uint32(8) if of_amax > np.uint32(8) else np.uint32(0)
    return exponent, float_of((np.uint32(254) - exponent) << np.uint32(23))


@compiled(nogil=True)
def _exponent_above(value: Any) -> Any:
    """Return the biased exponent of the next power of two that is not smaller; 0 is 2**-127."""
    bits: Any = bits_of(value)
    exponent, mantissa = bits >> np.uint32(23), bits & _MANTISSA
    at_least = np.uint32(0x400000) if exponent == np.uint32(0) else np.uint32(0)
    return exponent + np.uint32(1) if mantissa > at_least else exponent


@compiled(nogil=True, error_model="numpy")
def _to_e4m3(columns: Any, factor: Any, codes: Any) -> None:
    for h in range(columns.size):
        codes[h] = e4m3_code(widen(columns[h]) * factor)


@compiled(nogil=True, error_model="numpy")
def _to_e2m1(columns: Any, factor: Any, codes: Any) -> None:
    for h in range(columns.size // 2):
        low: Any = e2m1_code(widen(columns[2 * h]) * factor)
        high: Any = e2m1_code(widen(columns[2 * h + 1]) * factor)
        codes[h] = low | high << 4
