"""The kernel ``quantize_rows``: codes of 8 or 4 bits, and a scale for each block of columns."""

from __future__ import annotations

import ctypes

import torch

from fusco.core.quantization import Quantize
from fusco.core.rows import aligned
from fusco.cuda.kernels.abi import ELEMENT_TYPES, I64, POINTER, WARP_SIZE, struct
from fusco.cuda.kernels.launcher import Launcher
from fusco.cuda.tuning import QUANTIZE_BLOCKS_PER_SM as BLOCKS_PER_SM, QUANTIZE_THREADS as NUM_THREADS

_RULES = {"amax": "AMAX", "power-of-two": "POWER_OF_TWO", "mx-floor": "MX_FLOOR", "mx-ceil": "MX_CEIL"}
_COLUMNS_PER_BLOCK = NUM_THREADS // WARP_SIZE * 4 * 8 * WARP_SIZE  # UNROLL pieces of N columns of a lane

# ``QuantizeArgs`` of quantize_rows.cu.
QuantizeArgs = struct(
    "QuantizeArgs", (POINTER, "rows values scales"), (I64, "num_columns"), (ctypes.c_float, "global_scale")
)


def quantize_rows(
    launcher: Launcher, x: torch.Tensor, quantize: Quantize, values: torch.Tensor, scales: torch.Tensor
) -> None:
    """Launch; see ``fusco.cpu.kernels.quantize_rows``. ``values`` and ``scales`` are contiguous, of any dtype."""
    rows = aligned(x)
    if not rows.numel():
        return
    assert rows.shape[1] % quantize.columns == 0, (rows.shape, quantize.columns)
    assert values.is_contiguous(), values.stride()
    assert scales.is_contiguous(), scales.stride()
    max_grid = launcher.sms(None) * BLOCKS_PER_SM
    grid = min(-(-rows.numel() // _COLUMNS_PER_BLOCK), max_grid)
    key = ("quantize_rows", rows.dtype, quantize.rule, quantize.columns, scales.element_size(), grid)
    prepared = launcher.prepared.use(key)
    if prepared is None:
        constants = {
            "ROW_TYPE": ELEMENT_TYPES[rows.dtype],
            "BLOCK": quantize.columns,
            "RULE": _RULES.get(quantize.rule, "NVFP4"),
            "SCALE_BYTES": scales.element_size(),
        }
        prepared = launcher.prepare(key, constants, QuantizeArgs(), grid=grid, num_threads=NUM_THREADS)
    arguments = prepared.arguments
    arguments.rows, arguments.values, arguments.scales = rows.data_ptr(), values.data_ptr(), scales.data_ptr()
    arguments.num_columns, arguments.global_scale = rows.numel(), quantize.global_scale
    prepared.launch(launcher.stream)
