"""The kernel ``quantize_rows`` on the emulator, against the CPU's, which is compared with the twin."""

from __future__ import annotations

from itertools import cycle

import pytest
import torch
from emulated_scenes import alone
from emulator import is_available
from simulated_nodes import Rank

from fusco import Launch, Quantize
from fusco.core.quantization import QUANTIZED_DTYPES, lay_out_scales
from fusco.cpu.kernels.quantize_rows import quantize_rows
from fusco.cuda.quantizer import CudaQuantizer
from fusco.cuda.stream_order import StreamOrder
from generator import rows_to_quantize

pytestmark = pytest.mark.skipif(not is_available, reason="needs a C++ compiler, g++ or clang++")

FORMATS = [
    Quantize(),
    Quantize(scale="power-of-two", block=256),
    Quantize(scale="ue8m0", block=64),
    Quantize(block=16),
    Quantize("mxfp8"),
    Quantize("mxfp8", rounding="floor"),
    Quantize("nvfp4"),
    Quantize("nvfp4", global_scale=0.0017),
]


def quantizer_of(at: Rank) -> CudaQuantizer:
    return CudaQuantizer(at.context, StreamOrder(at.context.gpu, on_capture=lambda: None))


def assert_same(seen: torch.Tensor, expected: torch.Tensor) -> None:
    assert (seen.dtype, seen.shape) == (expected.dtype, expected.shape)
    bits = torch.int32 if seen.dtype == torch.float32 else torch.uint8
    is_nan = expected.float().isnan() if bits == torch.int32 else torch.zeros(seen.shape, dtype=torch.bool)
    assert torch.equal(seen.float().isnan(), expected.float().isnan())
    assert torch.equal(seen.view(bits)[~is_nan], expected.view(bits)[~is_nan])


@pytest.mark.parametrize(("quantize", "dtype"), list(zip(FORMATS, cycle(QUANTIZED_DTYPES), strict=False)), ids=str)
def test_codes_and_scales_are_those_of_the_cpu(quantize, dtype, folder):
    # One block of columns, a part of a warp's run, several blocks of threads.
    given = [rows_to_quantize(*shape, dtype) for shape in ((1, 256), (5, 768), (9, 1024))]
    given.append(rows_to_quantize(3, quantize.columns, dtype))

    def program(at: Rank) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [quantizer_of(at).quantize(x, quantize) for x in given]

    for x, (values, scales) in zip(given, alone(folder, program), strict=True):
        expected_values, expected_scales = torch.empty_like(values), torch.empty_like(scales)
        quantize_rows(x, quantize, expected_values.view(torch.uint8), expected_scales.view(torch.uint8))
        assert_same(values, expected_values)
        assert_same(scales, expected_scales)


def test_no_rows(folder):
    values, scales = alone(folder, lambda at: quantizer_of(at).quantize(torch.zeros(0, 256), Quantize()))
    assert (values.shape, scales.shape) == ((0, 256), (0, 2))


def test_scales_are_laid_out_behind_the_dispatch(folder):
    quantize = Quantize(scale="ue8m0", layout="tma")
    scales = torch.arange(20, dtype=torch.uint8).view(4, 5).view(torch.float8_e8m0fnu)

    def program(at: Rank) -> tuple[torch.Tensor, object]:
        return quantizer_of(at).lay_out(scales, quantize, 640, Launch())

    laid_out, event = alone(folder, program)
    expected = lay_out_scales(scales, quantize, 640)
    assert laid_out.stride() == expected.stride()
    assert torch.equal(laid_out, expected)
    assert event is None
