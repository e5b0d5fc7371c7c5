"""The kernel ``weight_gradients`` against its twin, on one GPU."""

import pytest
import torch

from comparison import assert_same_bits
from fusco.api.autograd import weight_gradients
from generator import random_of
from reference.weight_gradients import weight_gradients as reference

pytestmark = pytest.mark.cuda

DTYPES = [
    (torch.bfloat16, torch.float32),
    (torch.bfloat16, torch.float64),
    (torch.float16, torch.float32),
    (torch.float32, torch.float32),
    (torch.float32, torch.float64),
    (torch.float64, torch.float64),
]


@pytest.mark.parametrize(("dtype", "weights_dtype"), DTYPES, ids=str)
@pytest.mark.parametrize(
    ("num_rows", "hidden"), [(0, 8), (4, 0), (1, 1), (7, 33), (3000, 130), (20_000, 512), (50, 7168)]
)
def test_rows_have_the_twins_bits_and_dots_are_within_rounding(one, num_rows, hidden, dtype, weights_dtype):
    random = random_of(num_rows, hidden)
    grads, rows = (torch.randn(num_rows, hidden, generator=random).to(dtype) for _ in range(2))
    weights = torch.rand(num_rows, generator=random, dtype=weights_dtype)
    expected, _ = reference(grads, rows, weights)
    weighted, alone = grads.to(one.device, copy=True), grads.to(one.device, copy=True)
    dots = weight_gradients(weighted, rows.to(one.device), weights.to(one.device))
    assert weight_gradients(alone, None, weights.to(one.device)) is None
    assert_same_bits(weighted.cpu(), expected, "weighted rows")
    assert_same_bits(alone.cpu(), expected, "weighted rows without dots")
    assert dots.dtype == torch.promote_types(dtype, torch.float32)
    products = grads.double() * rows.double()
    bound = (hidden + 2) * torch.finfo(dots.dtype).eps * products.abs().sum(1)
    assert bool(((dots.cpu().double() - products.sum(1)).abs() <= bound).all())


def test_rows_that_are_not_aligned(one):
    memory = torch.arange(1 + 5 * 8, dtype=torch.float32, device=one.device)
    rows, grads = memory[1:].view(5, 8), torch.ones(5, 8, device=one.device)
    dots = weight_gradients(grads, rows, torch.full((5,), 2.0, device=one.device))
    assert dots.tolist() == rows.sum(1).tolist()
    assert bool((grads == 2).all())
