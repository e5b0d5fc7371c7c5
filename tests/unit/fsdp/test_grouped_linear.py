"""Grouped GEMM and the loop: the same numbers and gradients as one matrix product for each expert."""

import pytest
import torch

from fusco.fsdp.grouped_linear import _obstacle, grouped_linear, sizes_for


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
    assert not _obstacle(*wide[:2])
    assert _obstacle(*narrow[:2]) == "rows of 3 torch.float32 are not a multiple of 16 bytes"
    assert "they are torch.float64" in _obstacle(*operands((1,), 4, 4, torch.float64)[:2])


class OnCuda:
    """The attributes that are read of rows on a GPU."""

    is_cuda = True

    def __init__(self, dtype):
        self.dtype, self.itemsize = dtype, dtype.itemsize


@pytest.mark.skipif(not hasattr(torch.nn.functional, "grouped_mm"), reason="this torch has no grouped_mm")
@pytest.mark.parametrize(
    ("dtype", "width", "text"),
    [
        (torch.float32, 8, r"they are torch\.float32, and not torch\.bfloat16"),
        (torch.float16, 8, r"they are torch\.float16, and not torch\.bfloat16"),
        (torch.bfloat16, 12, r"rows of 12 torch\.bfloat16 are not a multiple of 16 bytes"),
    ],
)
def test_on_cuda_one_product_after_the_other_is_warned_of(dtype, width, text):
    weights = [torch.zeros(2, 8, 8, dtype=dtype), torch.zeros(2, 8, width, dtype=dtype)]
    with pytest.warns(UserWarning, match=text):
        assert sizes_for(OnCuda(dtype), weights, torch.tensor([1, 2])) == [1, 2]


def test_the_host_reads_sizes_only_if_needed(recwarn):
    if hasattr(torch.nn.functional, "grouped_mm"):
        weights = [torch.zeros(2, 8, 16, dtype=torch.bfloat16)] * 2
        assert sizes_for(OnCuda(torch.bfloat16), weights, torch.tensor([1, 2])) is None
    assert sizes_for(torch.zeros(3, 3), [torch.zeros(2, 3, 3)], torch.tensor([1, 2])) == [1, 2]
    assert not recwarn.list


@pytest.mark.parametrize(("num_inputs", "num_outputs", "dtype"), [(8, 12, torch.float32), (5, 3, torch.float64)])
def test_rows_behind_the_last_block_change_nothing(num_inputs, num_outputs, dtype):
    rows, weight, bias = operands((3, 0, 4, 5), num_inputs, num_outputs, dtype)
    weight, bias, counts = weight[:3].detach(), bias[:3].detach(), torch.tensor([3, 0, 4])
    with torch.no_grad():
        rows[7:] = float("nan")
    results = []
    for given in (rows, rows[:7]):
        leaves = [leaf.clone().requires_grad_() for leaf in (weight, bias)]
        out = grouped_linear(given, leaves[0].transpose(1, 2), leaves[1], counts)
        assert len(out) == len(given)
        cotangent = torch.full_like(out, float("nan"))
        cotangent[:7] = 1
        results.append([out[:7], *torch.autograd.grad(out, leaves, cotangent)])
    for first, second in zip(*results, strict=True):
        torch.testing.assert_close(first, second, rtol=0, atol=0)
