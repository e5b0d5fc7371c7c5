"""``gather_rows`` against indexing, bit for bit."""

import numpy as np
import pytest
import torch

from fusco.cpu.kernels.gather_rows import gather_parts, gather_rows
from generator import any_bits


@pytest.mark.parametrize("rows", [[], [2], [0, 1, 2, 3], [1, 3]])
@pytest.mark.parametrize("row_bytes", [1, 7, 64])
def test_rows_are_gathered_in_order_and_nothing_else_is_written(rows, row_bytes):
    pool = any_bits((4, row_bytes), torch.uint8, row_bytes, "pool")
    found = any_bits((5, row_bytes), torch.uint8, row_bytes, "dst")
    expected = found.clone()
    expected[: len(rows)] = pool[rows]
    gather_rows(pool.data_ptr(), np.array(rows, np.int64), row_bytes, found.view(-1))
    assert torch.equal(found, expected)


def test_parts_of_groups_are_gathered_one_after_the_other():
    pools = [any_bits((4, row_bytes), torch.uint8, row_bytes, "pool") for row_bytes in (8, 0, 7)]
    parts = np.array([(pool.data_ptr(), pool.shape[1]) for pool in pools], np.int64)
    groups = [torch.tensor(rows, dtype=torch.int64) for rows in ([2], [], [1, 3])]
    gathered, bounds = gather_parts(parts, groups)
    assert gathered.tolist() == [byte for rows in groups for pool in pools for byte in pool[rows].flatten().tolist()]
    assert bounds.tolist() == [0, 15, 15, 45]
