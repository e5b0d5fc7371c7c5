"""``add_rows`` against its PyTorch twin, bit for bit."""

import pytest
import torch

from fusco.core.rows import ROW_DTYPES, accumulation_dtype
from fusco.cpu.kernels.add_rows import add_rows
from generator import random_of, values
from reference.add_rows import add_rows as reference


def test_sums_by_hand():
    sums = torch.ones(3, 1)
    add_rows(torch.tensor([[1.0], [2.0]]), torch.tensor([2, 0]), sums)
    assert sums.tolist() == [[3.0], [1.0], [2.0]]


@pytest.mark.parametrize("dtype", ROW_DTYPES, ids=str)
@pytest.mark.parametrize("hidden", [0, 1, 3, 5, 17, 64, 1001])
@pytest.mark.parametrize("num_rows", [0, 1, 19])
def test_random_rows(dtype, hidden, num_rows):
    rows = values((num_rows, hidden), dtype, "rows", num_rows, hidden)
    before = values((23, hidden), accumulation_dtype(dtype), "sums", num_rows, hidden)
    row_to_sum = torch.randperm(23, generator=random_of("which"))[:num_rows]
    ours, expected = before.clone(), before.clone()
    add_rows(rows, row_to_sum, ours)
    reference(rows, row_to_sum, expected)
    assert torch.equal(ours.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_16_bit_value_is_widened_exactly(dtype):
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(dtype)
    sums = torch.full((1, len(every)), -0.0)  # the only value whose addition changes no other value
    add_rows(every[None], torch.tensor([0]), sums)
    expected = every.float()
    assert torch.equal(sums[0].isnan(), expected.isnan())
    numbers = ~expected.isnan()
    assert torch.equal(sums[0][numbers].view(torch.int32), expected[numbers].view(torch.int32))


def test_float32_rows_into_float64_sums():
    # Partial sums sent in float32 are added to float64 rows.
    sums = torch.zeros(1, 1, dtype=torch.float64)
    add_rows(torch.tensor([[0.1]]), torch.tensor([0]), sums)
    assert sums.item() == torch.tensor(0.1).double().item()
