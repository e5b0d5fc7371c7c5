"""``quantize_rows`` against its PyTorch twin, bit for bit; layouts of scales; what a reader gets back."""

import secrets
from itertools import cycle

import pytest
import torch

from fusco import Quantize
from fusco.core.quantization import QUANTIZED_DTYPES, dequantize_rows, lay_out_scales, widened_scales
from fusco.cpu.kernels.quantize_rows import quantize_rows
from generator import random_of, rows_to_quantize
from reference.quantize_rows import quantize_rows as reference

FORMATS = [
    Quantize(),
    Quantize(scale="power-of-two"),
    Quantize(scale="ue8m0"),
    Quantize(block=32),
    Quantize(block=16, scale="ue8m0"),
    Quantize("mxfp8"),
    Quantize("mxfp8", rounding="floor"),
    Quantize("nvfp4"),
    Quantize("nvfp4", global_scale=0.0017),
]
name_of = {each: f"{each.format}-{each.rule}-{each.scale}-{each.block}-{each.global_scale}" for each in FORMATS}.get


def quantized(x: torch.Tensor, quantize: Quantize) -> tuple[torch.Tensor, torch.Tensor]:
    widths = quantize.widths(x.shape[1])
    values = torch.full((len(x), widths.values), 0xA5, dtype=torch.uint8)
    scales = torch.full((len(x), widths.scales * quantize.scale_dtype.itemsize), 0xA5, dtype=torch.uint8)
    quantize_rows(x, quantize, values, scales)
    return values.view(quantize.value_dtype), scales.flatten().view(quantize.scale_dtype).view(len(x), widths.scales)


def assert_as_reference(x: torch.Tensor, quantize: Quantize) -> None:
    values, scales = quantized(x, quantize)
    expected_values, expected_scales = reference(x, quantize)
    assert scales.dtype == expected_scales.dtype
    is_nan = expected_scales.float().isnan()
    assert torch.equal(scales.float().isnan(), is_nan)
    bits = torch.int32 if scales.dtype == torch.float32 else torch.uint8
    differ = (scales.view(bits) != expected_scales.view(bits)) & ~is_nan
    assert not differ.any(), (differ.nonzero()[0], scales[differ], expected_scales[differ])
    differ = values.view(torch.uint8) != expected_values.view(torch.uint8)
    assert not differ.any(), (differ.nonzero()[0], values[differ], expected_values[differ])


@pytest.fixture
def seed() -> int:
    """Another one in each run; a failure shows it among the arguments of its test."""
    return secrets.randbits(32)


@pytest.mark.parametrize(("quantize", "dtype"), list(zip(FORMATS, cycle(QUANTIZED_DTYPES), strict=False)), ids=str)
def test_ten_thousand_random_rows_with_nan_infinity_zeros_and_subnormals(quantize, dtype, seed):
    assert_as_reference(rows_to_quantize(10_000, 256, dtype, seed), quantize)


@pytest.mark.parametrize(
    ("quantize", "dtype"), list(zip(FORMATS[5:], cycle([torch.bfloat16, torch.float32]), strict=False)), ids=str
)
def test_blocks_of_finite_values_have_the_bits_of_torchao(quantize, dtype, seed):
    """Where an mx scale is the least, 2**-127, torchao has others (docs/design.md)."""
    mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    nvfp4 = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor")
    x, modes = rows_to_quantize(10_000, 256, dtype, seed), mx.ScaleCalculationMode
    if quantize.format == "nvfp4":
        given = None if quantize.global_scale == 1.0 else torch.tensor(quantize.global_scale)
        expected_scales, expected = nvfp4.nvfp4_quantize(x, quantize.block, given)
    else:
        mode = modes.RCEIL if quantize.rounding == "ceil" else modes.FLOOR
        expected_scales, expected = mx.to_mx(x, torch.float8_e4m3fn, quantize.block, mode)
    values, scales = (part.view(torch.uint8) for part in quantized(x, quantize))
    expected_scales = expected_scales.contiguous().view(torch.uint8).view_as(scales)
    is_compared = x.view(*scales.shape, quantize.block).isfinite().all(-1)
    if quantize.format == "mxfp8":
        is_compared &= scales > 0
    assert is_compared.float().mean() > 0.9
    assert torch.equal(scales[is_compared], expected_scales[is_compared])
    codes, of_torchao = (part.contiguous().view(torch.uint8).view(*scales.shape, -1) for part in (values, expected))
    assert torch.equal(codes[is_compared], of_torchao[is_compared])


@pytest.mark.parametrize("quantize", FORMATS, ids=name_of)
def test_every_bfloat16_as_the_largest_of_a_block(quantize):
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(torch.bfloat16)
    x = torch.zeros(len(every), 128, dtype=torch.bfloat16)
    x[:, ::16], x[:, 1::16], x[:, 2::16] = every[:, None], every[:, None] / 3, -every[:, None] / 7
    assert_as_reference(x, quantize)


@pytest.mark.parametrize("quantize", FORMATS, ids=name_of)
def test_float32_around_the_steps_of_scales_and_codes(quantize):
    """Neighbours of each power of two times 448, 6 and the middles of codes, whose rounding decides."""
    middles = torch.tensor([448.0, 6.0, 1.0, 464.0, 1.0625, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 2.0**-10])
    steps = (middles[:, None] * torch.exp2(torch.arange(-20.0, 21.0))).view(-1)
    bits = steps.view(torch.int32)[:, None] + torch.arange(-2, 3, dtype=torch.int32)
    values = bits.view(torch.float32).view(-1)
    x = torch.zeros(len(values), 256)
    x[:, ::16] = values[:, None]
    x[:, 1::16] = values[torch.randperm(len(values), generator=random_of("other"))][:, None] * 0.01
    assert_as_reference(x, quantize)


@pytest.mark.parametrize("shape", [(0, 256), (1, 0), (3, 256)])
def test_no_rows_and_no_columns(shape):
    for quantize in FORMATS:
        assert_as_reference(torch.ones(shape), quantize)


@pytest.mark.parametrize("quantize", FORMATS, ids=name_of)
def test_values_times_scales_are_near_the_rows(quantize):
    x = torch.randn(50, 512, generator=random_of("near"))
    values, scales = quantized(x, quantize)
    back = dequantize_rows(values, scales, quantize, torch.float32)
    # Half of the last place of a code, relative to the value or to the largest one of its block.
    relative, of_amax = (1 / 4, 1 / 12) if quantize.format == "nvfp4" else (1 / 16, 2**-9 / 448)
    if quantize.rounding == "floor":
        of_amax = 1 / 8
    if quantize.format == "nvfp4":  # its scale is rounded, too
        of_amax += 1 / 16
        if quantize.global_scale == 1.0:
            of_amax += 2**-6 * 6
    amax = x.view(50, -1, quantize.block).abs().amax(-1).repeat_interleave(quantize.block, dim=1)
    assert ((back - x).abs() <= relative * x.abs() + of_amax * amax).all()


def test_scales_in_the_layout_of_deep_gemm():
    scales = torch.arange(15.0).view(5, 3)
    laid_out = lay_out_scales(scales, Quantize(layout="tma"), 384)
    assert torch.equal(laid_out, scales)
    assert laid_out.stride() == (1, 8)  # 5 floats are 20 bytes, aligned to 32
    of_experts = lay_out_scales(torch.stack((scales, scales + 1)), Quantize(layout="tma"), 384)
    assert of_experts.stride() == (24, 1, 8)
    assert torch.equal(of_experts[1], scales + 1)


def test_ue8m0_scales_are_packed_four_to_an_integer():
    exponents = torch.arange(10, dtype=torch.uint8).view(2, 5)
    quantize = Quantize(scale="ue8m0", layout="tma")
    packed = lay_out_scales(exponents.view(torch.float8_e8m0fnu), quantize, 640)
    assert (packed.dtype, packed.shape, packed.stride()) == (torch.int32, (2, 2), (1, 4))
    assert packed.tolist() == [[0x03020100, 0x04], [0x08070605, 0x09]]
    wide = widened_scales(packed, quantize, 640)
    assert torch.equal(wide, exponents.view(torch.float8_e8m0fnu).float())


@pytest.mark.parametrize(("format_", "num_rows", "num_scales"), [("nvfp4", 128, 4), ("mxfp8", 130, 6), ("nvfp4", 0, 5)])
def test_swizzled_scales_are_where_cublas_reads_them(format_, num_rows, num_scales):
    quantize = Quantize(format_, layout="swizzled")
    codes = torch.randint(0, 120, (2, num_rows, num_scales), generator=torch.Generator().manual_seed(1)).byte()
    seen = lay_out_scales(codes.view(quantize.scale_dtype), quantize, num_scales * quantize.columns)
    tiles_down, tiles_across = -(-num_rows // 128), -(-num_scales // 4)
    assert seen.shape == (2, tiles_down * 128, tiles_across * 4)
    assert seen.dtype == quantize.scale_dtype
    assert seen.is_contiguous()
    expected = torch.zeros(2, tiles_down * tiles_across * 512, dtype=torch.uint8)
    for row in range(num_rows):
        for column in range(num_scales):
            tile = row // 128 * tiles_across + column // 4
            place = tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + column % 4
            expected[:, place] = codes[:, row, column]
    assert torch.equal(seen.view(torch.uint8).view(2, -1), expected)
    wide = widened_scales(seen, quantize, num_scales * quantize.columns)
    assert torch.equal(wide[:, :num_rows], codes.view(quantize.scale_dtype).float())


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"format": "int8"}, "format must be one of 'fp8_e4m3', 'mxfp8', 'nvfp4', got 'int8'"),
        ({"block": 100}, "block of format 'fp8_e4m3' must be 16, 32, 64, 128, 256, got 100"),
        ({"format": "mxfp8", "block": 16}, "block of format 'mxfp8' must be 32, got 16"),
        ({"format": "mxfp8", "scale": "float32"}, "scale of format 'mxfp8' must be 'ue8m0', got 'float32'"),
        ({"format": "nvfp4", "layout": "tma"}, "layout of format 'nvfp4' must be 'row', 'swizzled', got 'tma'"),
        ({"rounding": "ceil"}, "rounding of format 'fp8_e4m3' must be None, got 'ceil'"),
        ({"global_scale": 2.0}, "format 'fp8_e4m3' has no global_scale, got 2.0"),
        ({"format": "nvfp4", "global_scale": 0.0}, "global_scale must be from 2**-100 to 2**100, got 0.0"),
    ],
)
def test_choices_that_do_not_go_together(arguments, error):
    with pytest.raises(ValueError, match=error.replace("*", r"\*")):
        Quantize(**arguments)
