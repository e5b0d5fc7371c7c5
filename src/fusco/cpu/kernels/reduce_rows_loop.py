"""CPU loop of ``reduce_rows``: a row of sums stays in the cache while its terms stream by, two at a time.

Two terms a pass halve the traffic between cache and registers; four gave no more.
"""

from __future__ import annotations

from typing import Any

from fusco.core.compiled import compiled
from fusco.cpu.kernels.intrinsics import widen


@compiled(nogil=True, error_model="numpy")
def reduce_rows(rows: Any, row_to_first_term: Any, term_to_row: Any, term_weight: Any, sums: Any) -> None:
    """See ``fusco.cpu.kernels.reduce_rows``."""
    width = sums.shape[1]
    for i in range(sums.shape[0]):
        total = sums[i]
        total[:] = 0
        term, end = row_to_first_term[i], row_to_first_term[i + 1]
        while term + 1 < end:
            weight, next_weight = term_weight[term], term_weight[term + 1]
            row, next_row = rows[term_to_row[term]], rows[term_to_row[term + 1]]
            for h in range(width):
                # Summed from left to right, as one at a time would be.
                total[h] = (total[h] + weight * widen(row[h])) + next_weight * widen(next_row[h])
            term += 2
        if term < end:
            weight, row = term_weight[term], rows[term_to_row[term]]
            for h in range(width):
                total[h] += weight * widen(row[h])
