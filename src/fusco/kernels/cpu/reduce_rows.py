"""CPU loop of ``reduce_rows``: a row of sums stays in the cache while its terms stream by."""

from __future__ import annotations

from typing import Any

import numba

from fusco.kernels.cpu.intrinsics import widen


@numba.njit(nogil=True, cache=True, error_model="numpy")
def reduce_rows(rows: Any, row_to_first_term: Any, term_to_row: Any, term_weight: Any, sums: Any) -> None:
    """See ``fusco.kernels.reduce_rows``."""
    width = sums.shape[1]
    for i in range(sums.shape[0]):
        total = sums[i]
        total[:] = 0
        for term in range(row_to_first_term[i], row_to_first_term[i + 1]):
            weight = term_weight[term]
            row = rows[term_to_row[term]]
            for h in range(width):
                total[h] += weight * widen(row[h])
