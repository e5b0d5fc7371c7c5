"""Grouped GEMM and the loop: the same numbers and gradients as one matrix product for each expert."""

import pytest
import torch

from fusco.fsdp.grouped_linear import _has_grouped_mm, grouped_linear


def operands(nums_rows, num_inputs, num_outputs, dtype):
    generator = torch.Generator().manual_seed(num_inputs)
    shapes = ((sum(nums_rows), num_inputs), (len(nums_rows), num_outputs, num_inputs), (len(nums_rows), num_outputs))
    return [torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes]


# Wide enough for grouped GEMM, or not.
@pytest.mark.parametrize(("num_inputs", "num_outputs", "dtype"), [(8, 12, torch.float32), (5, 3, torch.float64)])
@pytest.mark.parametrize("nums_rows", [(3, 1, 4), (0, 5, 0), (0, 0, 0), (7,)])
@pytest.mark.parametrize("has_bias", [True, False])
def test_each_block_has_its_matrix(nums_rows, num_inputs, num_outputs, dtype, has_bias):
    rows, weight, bias = operands(nums_rows, num_inputs, num_outputs, dtype)
    bias = bias if has_bias else None
    counts = torch.tensor(nums_rows)
    out = grouped_linear(rows, weight.transpose(1, 2), bias, counts)
    inputs = [rows, weight, bias] if has_bias else [rows, weight]
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=dtype)
    grads = torch.autograd.grad(out, inputs, cotangent)

    expert = torch.arange(len(nums_rows)).repeat_interleave(counts)
    expected = torch.einsum("ri,roi->ro", rows, weight[expert]) + (bias[expert] if has_bias else 0)
    torch.testing.assert_close(out, expected)
    for grad, wanted in zip(grads, torch.autograd.grad(expected, inputs, cotangent), strict=True):
        torch.testing.assert_close(grad, wanted)


@pytest.mark.skipif(not hasattr(torch.nn.functional, "grouped_mm"), reason="this torch has no grouped_mm")
def test_grouped_gemm_takes_wide_rows_only():
    wide, narrow = (operands((1,), num, num, torch.float32) for num in (4, 3))
    assert _has_grouped_mm(*wide[:2])
    assert not _has_grouped_mm(*narrow[:2])
    assert not _has_grouped_mm(*operands((1,), 4, 4, torch.float64)[:2])
