"""Rows of sums as they travel: those that are quantised are codes, then scales; launched on the current stream."""

from __future__ import annotations

import torch

from fusco.core.quantization import dequantize_rows
from fusco.core.wire import Wire
from fusco.cuda.kernels.launcher import Launcher
from fusco.cuda.kernels.quantize_rows import quantize_rows


def write_sums(launcher: Launcher, sums: torch.Tensor, wire: Wire, slot: torch.Tensor) -> None:
    """Write float32 sums (num_rows, hidden) to the first bytes of a slot as rows of the wire; the launcher's stream.

    The kernel writes codes and scales apart; two copies of PyTorch put them together.
    """
    assert wire.quantize is not None
    num_rows, hidden = sums.shape
    values = sums.new_empty(num_rows, hidden, dtype=torch.uint8)
    scales = sums.new_empty(num_rows, hidden // wire.quantize.columns)
    quantize_rows(launcher, sums, wire.quantize, values, scales)
    rows = slot[: num_rows * wire.width].view(num_rows, wire.width)
    rows[:, :hidden].copy_(values)
    rows[:, hidden:].copy_(scales.view(torch.uint8))


def read_sums(rows: torch.Tensor, wire: Wire, hidden: int) -> torch.Tensor:
    """Return sums (num_rows, hidden) of rows of the wire (num_rows, width): float32 if they are quantised."""
    if wire.quantize is None:
        return rows
    values = rows[:, :hidden].contiguous().view(torch.float8_e4m3fn)
    scales = rows[:, hidden:].contiguous().view(torch.float32)
    return dequantize_rows(values, scales, wire.quantize, torch.float32)
