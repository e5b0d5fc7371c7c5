"""The kernel ``weighted_sum`` against its twin, on one GPU."""

import pytest
import torch

from comparison import assert_same_bits
from fusco.bench.shuffle.baseline import weighted_sum, weighted_sum_on_cpu
from generator import random_of

pytestmark = pytest.mark.cuda


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("num_rows", "num_tokens", "num_topk", "hidden"),
    [(9, 0, 2, 8), (0, 3, 2, 8), (1, 1, 1, 1), (50, 7, 11, 33), (4000, 3000, 2, 130), (1000, 500, 8, 7168)],
)
def test_sums_have_the_twins_bits(one, num_rows, num_tokens, num_topk, hidden, dtype):
    random = random_of(num_rows, num_tokens, hidden)
    rows = torch.randn(num_rows, hidden, generator=random).to(dtype)
    row_idx = torch.randint(-1, num_rows + 1, (num_tokens, num_topk), generator=random)  # some name no row
    weights = torch.rand(num_tokens, num_topk, generator=random)
    seen = weighted_sum(rows.to(one.device), row_idx.to(one.device), weights.to(one.device))
    assert_same_bits(seen.cpu(), weighted_sum_on_cpu(rows, row_idx, weights), "weighted sums")
