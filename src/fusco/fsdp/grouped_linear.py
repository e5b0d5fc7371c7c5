"""One linear layer for each block of rows: grouped GEMM, or a loop where PyTorch has none for the operands."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812  its name everywhere


def grouped_linear(
    rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, num_rows_per_expert: torch.Tensor
) -> torch.Tensor:
    """Multiply each expert's block of rows with its own matrix.

    Args:
        rows: (num_rows, num_inputs), expert-major.
        weight: (num_experts, num_inputs, num_outputs), in any order of strides; of the dtype of the rows.
        bias: (num_experts, num_outputs), or ``None``.
        num_rows_per_expert: int64 (num_experts,), adding up to ``num_rows``.

    Returns:
        (num_rows, num_outputs).

    >>> weight = torch.tensor([[[1.0], [1.0]], [[0.0], [2.0]]])  # expert 0 adds, expert 1 doubles the second
    >>> grouped_linear(torch.tensor([[1.0, 2], [3, 4], [5, 6]]), weight, None, torch.tensor([1, 2])).tolist()
    [[3.0], [8.0], [12.0]]

    """
    if _has_grouped_mm(rows, weight):
        out = F.grouped_mm(rows, weight, offs=num_rows_per_expert.cumsum(0).int())
    else:
        out = _one_by_one(rows, weight, num_rows_per_expert)
    if bias is not None:
        out = out + bias.repeat_interleave(num_rows_per_expert, dim=0, output_size=len(rows))
    return out


@torch.compiler.disable(reason="the sizes of blocks are values of a tensor")  # type: ignore[untyped-decorator,no-untyped-call]
def _one_by_one(rows: torch.Tensor, weight: torch.Tensor, num_rows_per_expert: torch.Tensor) -> torch.Tensor:
    # An expert without rows has an empty block, so that its gradient is zero and not missing.
    blocks = torch.split(rows, num_rows_per_expert.tolist())
    return torch.cat([block @ matrix for block, matrix in zip(blocks, weight.unbind(), strict=True)])


def _has_grouped_mm(rows: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether ``torch.nn.functional.grouped_mm`` (2.10 and newer) takes these: 16-byte strides, and narrow dtypes.

    Of other dtypes than bfloat16, which the CPU takes, compilers do not know what comes out (PyTorch 2.13).
    """
    has_bfloat16_only = rows.is_cuda or torch.compiler.is_compiling()
    dtypes = (torch.bfloat16,) if has_bfloat16_only else (torch.bfloat16, torch.float16, torch.float32)
    widths = (rows.shape[1], weight.shape[2])
    return hasattr(F, "grouped_mm") and rows.dtype in dtypes and all(w * rows.itemsize % 16 == 0 for w in widths)
