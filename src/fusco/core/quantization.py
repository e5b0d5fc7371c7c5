"""Formats of quantised rows: what ``dispatch(..., quantize=...)`` sends, and in which layout it arrives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from fusco.core.integers import check_integer

E4M3_MAX, E2M1_MAX = 448.0, 6.0
QUANTIZED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)  # of rows that can be quantised

ScaleRule = Literal["amax", "power-of-two", "mx-floor", "mx-ceil", "nvfp4"]

_BLOCKS = {"fp8_e4m3": (16, 32, 64, 128, 256), "mxfp8": (32,), "nvfp4": (16,)}
_SCALES = {"fp8_e4m3": ("float32", "power-of-two", "ue8m0"), "mxfp8": ("ue8m0",), "nvfp4": ("e4m3",)}
_LAYOUTS = {"fp8_e4m3": ("row", "tma"), "mxfp8": ("row", "tma", "swizzled"), "nvfp4": ("row", "swizzled")}
_GLOBAL_SCALES = 2.0**-100, 2.0**100  # with which a block's scale times the global one is a normal float32
_TMA_BYTES = 16  # strides that TMA reads are multiples of this
_TILE = 4, 32, 4  # of swizzled scales: groups of rows, rows of a group, columns


@dataclass(frozen=True)
class Quantize:
    """Quantise rows where their tokens are, so that links carry half of the bytes of bfloat16, or a quarter.

    Each run of ``block`` columns of a row, a *scale block*, has a scale: a value is about its code times the scale. All
    bits are defined, the same on the CPU and on CUDA: those of the public functions below, run by PyTorch on the CPU.
    That is float32 with correctly rounded divisions; on CUDA PyTorch multiplies by the inverse of a constant instead,
    so the functions themselves may differ there in the last bit of a scale. Values that are too large become the
    largest one, as in PyTorch from 2.13 on and in the conversions of NVIDIA's devices, also in older PyTorch. A NaN is
    always the code 0x7f (also those that the reference gives a sign).

    ============== ================================== ===========================================================
    format         values; scales of a row            bits of
    ============== ================================== ===========================================================
    ``"fp8_e4m3"`` float8_e4m3fn (H); per 128 columns ``per_token_cast_to_fp8`` of DeepGEMM (``"float32"``), with
                                                      ``use_ue8m0`` (``"power-of-two"``, ``"ue8m0"``)
    ``"mxfp8"``    float8_e4m3fn (H); float8_e8m0fnu  ``to_mx`` of torchao with ``ScaleCalculationMode.FLOOR`` (OCP
                   per 32                             MX 1.0) or ``RCEIL`` (NVIDIA's)
    ``"nvfp4"``    uint8 (H / 2), two e2m1 codes a    ``nvfp4_quantize`` of torchao with
                   byte, the first in the low bits;   ``per_tensor_scale=global_scale``
                   float8_e4m3fn per 16
    ============== ================================== ===========================================================

    A block with a NaN has a NaN scale in ``"mxfp8"`` and ``"nvfp4"``, and in ``"fp8_e4m3"`` with float32 scales. Its
    e2m1 codes are then all 7, where torchao has bits of the NaN. An infinity makes its block's mx scale NaN; in
    ``"fp8_e4m3"`` with float32 scales the scale is infinite, the infinity itself NaN and other values 0; with powers of
    two, and in ``"nvfp4"``, it becomes the largest value.

    Attributes:
        format: see the table.
        block: columns of a block: 16, 32, 64, 128 or 256 for ``"fp8_e4m3"`` (``None`` means 128), 32 for ``"mxfp8"``,
            16 for ``"nvfp4"``. Rows are a multiple of it wide.
        scale: for ``"fp8_e4m3"``: ``"float32"``, ``"power-of-two"`` (the next larger power of two, as float32; DeepEP's
            ``round_scale``) or ``"ue8m0"`` (its exponent, one byte; DeepEP's ``use_ue8m0``). ``None`` means
            ``"float32"``; other formats have one kind each, ``"ue8m0"`` and ``"e4m3"``.
        layout: of the scales on arrival. ``"row"``: (num_rows, H / block), contiguous. ``"tma"``: the same shape,
            column-major, with columns a multiple of 16 bytes apart, as DeepGEMM's ``get_mn_major_tma_aligned_tensor``
            returns; ue8m0 scales are packed four to an int32, the first in the lowest byte, (num_rows, ceil(H / block /
            4)), as DeepGEMM reads them on Blackwell. Not for ``"nvfp4"``. ``"swizzled"``, of mx and NVFP4 scales: bytes
            in the order of cuBLAS and CUTLASS on Blackwell (PyTorch's ``SWIZZLE_32_4_4``), filled up with zeros to a
            multiple of 128 rows and of 4 columns: (ceil(num_rows / 128) * 128, ceil(H / block / 4) * 4). A block of an
            expert begins at a tile if ``expert_alignment``, or ``rows_per_expert``, is a multiple of 128.
        rounding: of mx scales: ``"ceil"`` (the default, also of torchao's inference) to the power of two with which no
            value is too large, or ``"floor"``, which may cut off an eighth of the largest ones.
        global_scale: of ``"nvfp4"``: the scale of a block is a multiple of it, and a value is code x scale x
            global_scale. The caller has it from a calibration, as the largest absolute value over 2688; to find it in
            each call, all ranks would have to wait for each other first. FlashInfer calls the inverse "global scale".
        straight_through: let gradients of rows go to ``x`` as if nothing were quantised (``Dispatched.dequantize``,
            ``Dispatched.gradients``); otherwise an ``x`` that requires them is rejected.

    Raises:
        TypeError, ValueError: for values that do not go together.

    Source: DeepGEMM at 38939a4 (its modules utils.math and utils.layout); torchao at 36027d8 (``to_mx`` and
    ``nvfp4_quantize`` of prototype.mx_formats); OCP Microscaling Formats 1.0, section 6.3.
    """

    format: Literal["fp8_e4m3", "mxfp8", "nvfp4"] = "fp8_e4m3"
    block: int | None = None
    scale: Literal["float32", "power-of-two", "ue8m0", "e4m3"] | None = None
    layout: Literal["row", "tma", "swizzled"] = "row"
    rounding: Literal["floor", "ceil"] | None = None
    global_scale: float = 1.0
    straight_through: bool = False

    def __post_init__(self) -> None:
        if self.format not in _BLOCKS:
            raise ValueError(f"format must be one of {', '.join(map(repr, _BLOCKS))}, got {self.format!r}")
        for name, allowed, default in (
            ("block", _BLOCKS[self.format], 128 if self.format == "fp8_e4m3" else _BLOCKS[self.format][0]),
            ("scale", _SCALES[self.format], _SCALES[self.format][0]),
            ("layout", _LAYOUTS[self.format], "row"),
            ("rounding", ("floor", "ceil") if self.format == "mxfp8" else (None,), None),
        ):
            value = getattr(self, name)
            if value is None:
                value = "ceil" if name == "rounding" and self.format == "mxfp8" else default
                object.__setattr__(self, name, value)
            if name == "block":
                check_integer("block", value, least=1)
            if value not in allowed:
                choices = ", ".join(map(repr, allowed))
                raise ValueError(f"{name} of format {self.format!r} must be {choices}, got {value!r}")
        if not isinstance(self.global_scale, (int, float)) or isinstance(self.global_scale, bool):
            raise TypeError(f"global_scale must be a number, got {self.global_scale!r}")
        least, most = _GLOBAL_SCALES
        if not least <= self.global_scale <= most:
            raise ValueError(f"global_scale must be from 2**-100 to 2**100, got {self.global_scale}")
        if self.format != "nvfp4" and self.global_scale != 1.0:
            raise ValueError(f"format {self.format!r} has no global_scale, got {self.global_scale}")
        if not isinstance(self.straight_through, bool):
            raise TypeError(f"straight_through must be a bool, got {self.straight_through!r}")

    @property
    def columns(self) -> int:
        """Columns of a block, ``block``."""
        assert self.block is not None
        return self.block

    @property
    def rule(self) -> ScaleRule:
        """The rule by which the largest absolute value of a block gives its scale."""
        if self.format == "nvfp4":
            return "nvfp4"
        if self.format == "mxfp8":
            return "mx-ceil" if self.rounding == "ceil" else "mx-floor"
        return "amax" if self.scale == "float32" else "power-of-two"

    @property
    def value_dtype(self) -> torch.dtype:
        """Dtype of the values."""
        return torch.uint8 if self.format == "nvfp4" else torch.float8_e4m3fn

    @property
    def scale_dtype(self) -> torch.dtype:
        """Dtype in which scales are sent, and arrive unless they are packed."""
        byte_dtypes = {"ue8m0": torch.float8_e8m0fnu, "e4m3": torch.float8_e4m3fn}
        return byte_dtypes.get(str(self.scale), torch.float32)

    def widths(self, hidden: int) -> Widths:
        """Return the elements of a quantised row, and of its scales, of ``hidden`` columns.

        >>> Quantize().widths(7168), Quantize("nvfp4").widths(7168)
        (Widths(values=7168, scales=56), Widths(values=3584, scales=448))
        """
        return Widths(hidden // 2 if self.format == "nvfp4" else hidden, hidden // self.columns)

    def row_bytes(self, hidden: int) -> int:
        """Return the bytes of a quantised row with its scales, of which ``max_bytes_per_token`` must be enough.

        >>> Quantize().row_bytes(7168), Quantize("mxfp8").row_bytes(7168), Quantize("nvfp4").row_bytes(7168)
        (7392, 7392, 4032)
        """
        widths = self.widths(hidden)
        return widths.values + widths.scales * self.scale_dtype.itemsize


class Widths(NamedTuple):
    """Elements of a quantised row and of its scales."""

    values: int
    scales: int


def empty_scales(rows: tuple[int, ...], quantize: Quantize, hidden: int, device: torch.device) -> torch.Tensor:
    """Return uninitialised memory for the scales of ``rows`` (num_rows,) or (num_experts, num_rows) in a TMA layout.

    >>> empty_scales((5,), Quantize(layout="tma"), 512, torch.device("cpu")).stride()
    (1, 8)
    >>> empty_scales((2, 5), Quantize(scale="ue8m0", layout="tma"), 640, torch.device("cpu")).stride()
    (16, 1, 8)
    """
    num_scales, dtype = quantize.widths(hidden).scales, quantize.scale_dtype
    if dtype.itemsize == 1:
        num_scales, dtype = -(-num_scales // 4), torch.int32
    aligned = -(-max(1, rows[-1]) * dtype.itemsize // _TMA_BYTES) * _TMA_BYTES // dtype.itemsize
    memory = torch.empty((*rows[:-1], num_scales, aligned), dtype=dtype, device=device)
    return memory[..., : rows[-1]].transpose(-1, -2)


def lay_out_scales(scales: torch.Tensor, quantize: Quantize, hidden: int) -> torch.Tensor:
    """Return scales that arrived as rows (..., num_rows, H / block) in the layout of ``quantize``.

    For ``"row"`` these are the same; for the others they are copied, by one PyTorch copy, or two if they are filled up;
    for ``"tma"`` with four ue8m0 scales packed.
    """
    if quantize.layout == "row":
        return scales
    if quantize.layout == "swizzled":
        return _swizzled(scales)
    laid_out = empty_scales(tuple(scales.shape[:-1]), quantize, hidden, scales.device)
    if scales.element_size() == 1:
        scales = scales.view(torch.uint8)
        if missing := -scales.shape[-1] % 4:
            scales = torch.nn.functional.pad(scales, (0, missing))
        scales = scales.contiguous().view(torch.int32)
    return laid_out.copy_(scales)


def dequantize_rows(values: torch.Tensor, scales: torch.Tensor, quantize: Quantize, dtype: torch.dtype) -> torch.Tensor:
    """Return rows (..., H) of ``dtype``: values times scales (and the global one) in float32, rounded once.

    >>> values = torch.tensor([[1.0] * 128]).to(torch.float8_e4m3fn)
    >>> dequantize_rows(values, torch.tensor([[0.5]]), Quantize(), torch.bfloat16)[0, 127]
    tensor(0.5000, dtype=torch.bfloat16)
    """
    hidden = values.shape[-1] * (2 if quantize.format == "nvfp4" else 1)
    factors = widened_scales(scales, quantize, hidden)[..., : values.shape[-2], :]
    wide = _e2m1_values(values) if quantize.format == "nvfp4" else values.to(torch.float32)
    blocks = wide.view(*factors.shape, quantize.columns) * factors[..., None]
    return blocks.view(wide.shape).to(dtype)


def widened_scales(scales: torch.Tensor, quantize: Quantize, hidden: int) -> torch.Tensor:
    """Return scales in any layout as float32 (..., num_rows, H / block), contiguous, times the global one.

    Those that are swizzled have rows of zeros behind.
    """
    num_scales = quantize.widths(hidden).scales
    if quantize.layout == "swizzled":
        scales = _unswizzled(scales)[..., :num_scales]
    if scales.dtype == torch.int32:
        # Cloned, as ``contiguous`` leaves any strides to dimensions of one element.
        of_bytes = scales.clone(memory_format=torch.contiguous_format).view(torch.uint8)[..., :num_scales]
        return of_bytes.contiguous().view(torch.float8_e8m0fnu).to(torch.float32)
    wide = scales.to(torch.float32).contiguous()
    return wide * quantize.global_scale if quantize.format == "nvfp4" else wide


def _swizzled(scales: torch.Tensor) -> torch.Tensor:
    """Return scales of one byte in tiles: row ``r``, column ``c`` of one is its byte ``r % 32 * 16 + r // 32 * 4 + c``.

    Source: cuBLAS 13, "1D block scaling factors layout".
    """
    groups, rows, columns = _TILE
    missing = -scales.shape[-1] % columns, -scales.shape[-2] % (groups * rows)
    filled = torch.nn.functional.pad(scales.view(torch.uint8), (0, missing[0], 0, missing[1]))
    *outer, num_rows, num_columns = filled.shape
    tiles = filled.view(*outer, num_rows // (groups * rows), groups, rows, num_columns // columns, columns)
    return _transposed(tiles, (-5, -2, -3, -4, -1)).view(filled.shape).view(scales.dtype)


def _unswizzled(scales: torch.Tensor) -> torch.Tensor:
    groups, rows, columns = _TILE
    *outer, num_rows, num_columns = scales.shape
    tiles = scales.view(torch.uint8).view(
        *outer, num_rows // (groups * rows), num_columns // columns, rows, groups, columns
    )
    return _transposed(tiles, (-5, -2, -3, -4, -1)).view(scales.shape).view(scales.dtype)


def _transposed(tiles: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    """Return a contiguous copy with the last dimensions in another order."""
    return tiles.permute(*range(tiles.ndim - len(order)), *order).contiguous()


def _e2m1_values(packed: torch.Tensor) -> torch.Tensor:
    """Return the values of two codes a byte, float32, twice as many."""
    magnitudes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    table = torch.tensor([*magnitudes, *(-each for each in magnitudes)], dtype=torch.float32, device=packed.device)
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
    return table[codes.long()]
