"""Add rows of codes and scales into scattered sums: as ``add_rows``, of sums that travelled quantised."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import carray  # type: ignore[attr-defined]  # not in its list of exports

from fusco.core.compiled import compiled
from fusco.core.quantization import Quantize
from fusco.cpu.kernels.intrinsics import pointer_to

_EVERY_CODE = torch.arange(256, dtype=torch.uint8, device="cpu")


def add_quantized_rows(address: int, quantize: Quantize, row_to_sum: torch.Tensor, sums: torch.Tensor) -> None:
    """Add the values of row ``i`` to ``sums[row_to_sum[i]]``, each value rounded to float32 before it is added.

    Args:
        address: of the rows, each e4m3 codes (hidden,) and then float32 scales (hidden / block,), without gaps.
        quantize: the format of the rows.
        row_to_sum: int64 (num_rows,), contiguous, no index twice.
        sums: float32 (num_sums, hidden), contiguous; changed in place.

    >>> row = torch.tensor([2.0] * 16).to(torch.float8_e4m3fn).view(torch.uint8).tolist()
    >>> row = torch.tensor(row + torch.tensor([0.5]).view(torch.uint8).tolist(), dtype=torch.uint8)
    >>> sums = torch.ones(3, 16)
    >>> add_quantized_rows(row.data_ptr(), Quantize(block=16), torch.tensor([1]), sums)
    >>> sums[:, 0].tolist()
    [1.0, 2.0, 1.0]
    """
    values = _EVERY_CODE.view(torch.float8_e4m3fn).to(torch.float32).numpy()
    _add(address, quantize.columns, quantize.row_bytes(sums.shape[1]), row_to_sum.numpy(), sums.numpy(), values)


@compiled(nogil=True)
def _add(address: int, block: int, row_bytes: int, row_to_sum: Any, sums: Any, values: Any) -> None:
    hidden = sums.shape[1]
    for i in range(len(row_to_sum)):
        codes = carray(pointer_to(address + i * row_bytes), (hidden,), np.uint8)
        scales = carray(pointer_to(address + i * row_bytes + hidden), (hidden // block,), np.float32)
        total = sums[row_to_sum[i]]
        for j in range(hidden // block):
            scale = scales[j]
            for h in range(j * block, (j + 1) * block):
                total[h] += values[codes[h]] * scale
