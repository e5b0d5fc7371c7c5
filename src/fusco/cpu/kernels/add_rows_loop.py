"""CPU loop of ``add_rows``."""

from __future__ import annotations

from typing import Any

from fusco.core.compiled import compiled
from fusco.cpu.kernels.intrinsics import widen


@compiled(nogil=True)
def add_rows(rows: Any, row_to_sum: Any, sums: Any) -> None:
    """See ``fusco.cpu.kernels.add_rows``."""
    width = sums.shape[1]
    for i in range(row_to_sum.size):
        row, total = rows[i], sums[row_to_sum[i]]
        for h in range(width):
            total[h] += widen(row[h])
