"""Emulated kernels that one rank launches alone: copies, sums and gradients of weights."""

from __future__ import annotations

import pytest
import torch
from emulated_scenes import alone
from emulator import is_available
from simulated_nodes import Rank

from comparison import assert_same_bits
from fusco.bench.shuffle.baseline import weighted_sum
from fusco.cuda.kernels.copy_segments import copy_segments as copy_on_device
from fusco.cuda.kernels.weight_gradients import launch as launch_weight_gradients
from fusco.cuda.kernels.weighted_sum import weighted_sum as launch_weighted_sum
from generator import random_of
from reference.copy_segments import copy_segments
from reference.weight_gradients import weight_gradients

pytestmark = pytest.mark.skipif(not is_available, reason="needs a C++ compiler, g++ or clang++")


@pytest.mark.parametrize("num_segments", [1, 2, 40])  # of one, a plain copy
def test_scattered_segments_are_copied(num_segments, folder):
    random = random_of("segments", num_segments)
    sizes = torch.randint(0, 70_000 // num_segments, (num_segments,), generator=random)
    src = torch.randint(0, 256, (int(sizes.sum()) + 5,), generator=random, dtype=torch.uint8)
    order = torch.randperm(num_segments, generator=random)
    starts = sizes.cumsum(0) - sizes
    dst_starts = torch.empty_like(starts)
    dst_starts[order] = sizes[order].cumsum(0) - sizes[order] + 3
    expected = torch.zeros_like(src)
    copy_segments(src, starts, expected, dst_starts, sizes)

    def program(at: Rank) -> torch.Tensor:
        dst = torch.zeros_like(src)
        copy_on_device(at.context.launcher(at.stream), src, starts, dst, dst_starts, sizes)
        return dst

    assert torch.equal(alone(folder, program), expected)


@pytest.mark.parametrize(
    ("dtype", "num_rows", "hidden"),
    [
        (torch.bfloat16, 1, 1),
        (torch.bfloat16, 9, 520),
        (torch.float16, 30, 33),
        (torch.float32, 9, 520),
        (torch.float64, 30, 33),
    ],
    ids=str,
)
def test_gradients_of_weights(num_rows, hidden, dtype, folder):
    random = random_of(num_rows, hidden)
    grads, rows = (torch.randn(num_rows, hidden, generator=random).to(dtype) for _ in range(2))
    weights = torch.rand(num_rows, generator=random)
    expected, _ = weight_gradients(grads, rows, weights)

    def program(at: Rank) -> tuple[torch.Tensor, torch.Tensor | None]:
        weighted = grads.clone()
        return weighted, launch_weight_gradients(at.library, at.stream.cuda_stream, weighted, rows, weights)

    weighted, dots = alone(folder, program)
    assert_same_bits(weighted, expected, "weighted rows")
    products = grads.double() * rows.double()
    bound = (hidden + 2) * torch.finfo(dots.dtype).eps * products.abs().sum(1)
    assert bool(((dots.double() - products.sum(1)).abs() <= bound).all())


@pytest.mark.parametrize(
    ("dtype", "num_tokens", "num_topk", "hidden"),
    [
        (torch.bfloat16, 30, 8, 96),
        (torch.float16, 0, 2, 8),
        (torch.float16, 7, 1, 33),
        (torch.float32, 5, 11, 1),
        (torch.float64, 7, 1, 33),
    ],
    ids=str,
)
def test_weighted_sums_have_the_twins_bits(num_tokens, num_topk, hidden, dtype, folder):
    random = random_of("weighted sum", num_tokens, hidden)
    rows = torch.randn(13, hidden, generator=random).to(dtype)
    row_idx = torch.randint(-2, 16, (num_tokens, num_topk), generator=random)  # some name no row
    weights = torch.rand(num_tokens, num_topk, generator=random)

    def program(at: Rank) -> torch.Tensor:
        return launch_weighted_sum(at.library, at.stream.cuda_stream, rows, row_idx, weights)

    assert_same_bits(alone(folder, program), weighted_sum(rows, row_idx, weights), "weighted sums")
