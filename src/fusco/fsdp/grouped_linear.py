"""A linear layer per block of rows: a grouped GEMM, or a loop where PyTorch's does not support the operands."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812  the usual name


def grouped_linear(
    rows: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    num_rows_per_expert: torch.Tensor,
    sizes: list[int] | None = None,
) -> torch.Tensor:
    """Multiply each expert's block of rows by that expert's matrix.

    Args:
        rows: (num_rows, num_inputs), expert-major.
        weight: (num_experts, num_inputs, num_outputs), in any order of strides; of the dtype of the rows.
        bias: (num_experts, num_outputs), or ``None``.
        num_rows_per_expert: int64 (num_experts,), adding up to ``num_rows``, or to fewer: results of the other rows, at
            the end, are undefined.
        sizes: the same on the host, from ``sizes_for``; without them the loop copies them to the host.

    Returns:
        (num_rows, num_outputs).

    >>> weight = torch.tensor([[[1.0], [1.0]], [[0.0], [2.0]]])  # expert 0 adds, expert 1 doubles the second
    >>> grouped_linear(torch.tensor([[1.0, 2], [3, 4], [5, 6]]), weight, None, torch.tensor([1, 2])).tolist()
    [[3.0], [8.0], [12.0]]
    """
    if not _obstacle(rows, weight):
        out = F.grouped_mm(rows, weight, offs=num_rows_per_expert.cumsum(0).int())
    else:
        out = _one_by_one(rows, weight, num_rows_per_expert, sizes)
    if bias is not None:
        # The last row of biases is for rows of no expert, so that their gradients go nowhere.
        ends, numbers = num_rows_per_expert.cumsum(0), torch.arange(len(rows), device=rows.device)
        out = out + F.pad(bias, (0, 0, 0, 1))[torch.searchsorted(ends, numbers, right=True)]
    return out


def sizes_for(
    rows: torch.Tensor, weights: Sequence[torch.Tensor], num_rows_per_expert: torch.Tensor
) -> list[int] | None:
    """Return the sizes of blocks on the host if grouped GEMM does not support all of these weights, else ``None``.

    On CUDA this synchronises the host and warns, since one product after the other is slow.
    """
    obstacle = next(filter(None, (_obstacle(rows, weight) for weight in weights)), "")
    if not obstacle or torch.compiler.is_compiling():
        return None
    if rows.is_cuda:
        warnings.warn(
            f"grouped GEMM does not support the experts' rows and weights: {obstacle}. fusco computes one product "
            f"after the other instead, and the host waits in every layer",
            stacklevel=2,
        )
    return num_rows_per_expert.tolist()


@torch.compiler.disable(reason="the sizes of blocks are values of a tensor")  # type: ignore[untyped-decorator,no-untyped-call]
def _one_by_one(
    rows: torch.Tensor, weight: torch.Tensor, num_rows_per_expert: torch.Tensor, sizes: list[int] | None
) -> torch.Tensor:
    # An expert without rows has an empty block, so that its gradient is zero and not missing.
    sizes = num_rows_per_expert.tolist() if sizes is None else sizes
    num_others = len(rows) - sum(sizes)
    *blocks, _ = torch.split(rows, [*sizes, num_others])
    results = [block @ matrix for block, matrix in zip(blocks, weight.unbind(), strict=True)]
    return torch.cat([*results, rows.new_zeros(num_others, weight.shape[2])])


def _obstacle(rows: torch.Tensor, weight: torch.Tensor) -> str:
    """Return why ``torch.nn.functional.grouped_mm`` does not support these; empty if it does.

    The CPU supports other dtypes than bfloat16, too, but compilers have no fake for them (PyTorch 2.13).
    """
    has_bfloat16_only = rows.is_cuda or torch.compiler.is_compiling()
    dtypes = (torch.bfloat16,) if has_bfloat16_only else (torch.bfloat16, torch.float16, torch.float32)
    if rows.dtype not in dtypes:
        return f"they are {rows.dtype}, and not {' or '.join(map(str, dtypes))}"
    odd = [width for width in weight.shape[1:] if width * rows.itemsize % 16]
    return f"rows of {odd[0]} {rows.dtype} are not a multiple of 16 bytes" if odd else ""
