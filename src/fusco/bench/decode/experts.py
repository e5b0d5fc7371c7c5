"""Experts of a layer with random weights, in bfloat16, float32 or FP8: products of expert-major and of masked rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812  the usual name

from fusco.bench.decode.job import DecodeJob
from fusco.fsdp.grouped_linear import grouped_linear

_FP8 = torch.float8_e4m3fn
_STD = 0.02  # of weights, as in Qwen3
_MAX_EXPERTS = 1 << 14

Rows = tuple[torch.Tensor, ...]  # values (..., hidden), and with FP8 the scale of each row, float32 (..., 1)


def quantize_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return FP8 (e4m3) values of rows (..., width) and the scale of each row, float32 (..., 1).

    The largest value of a row becomes 448, the largest of the format; rows of zeros have a tiny scale.

    >>> values, scales = quantize_rows(torch.tensor([[1.0, -2.0], [0.0, 0.0]]))
    >>> (values.float() * scales).tolist()
    [[1.0, -2.0], [0.0, 0.0]]
    """
    wide = rows.float()
    scales = wide.abs().amax(-1, keepdim=True).clamp(min=1e-12) / torch.finfo(_FP8).max
    return (wide / scales).to(_FP8), scales


def dequantize(rows: Rows) -> torch.Tensor:
    """Return rows in float32 if they have scales, else as they are."""
    return rows[0].float() * rows[1] if len(rows) > 1 else rows[0]


@dataclass(frozen=True)
class Matrices:
    """A matrix of each expert: (num_experts, num_outputs, num_inputs), with FP8 and a scale of each output."""

    values: torch.Tensor
    scales: torch.Tensor | None = None  # float32 (num_experts, num_outputs, 1)

    @classmethod
    def of(cls, wide: torch.Tensor, *, is_fp8: bool) -> Matrices:
        """Return matrices of the precision that products take."""
        return cls(*quantize_rows(wide)) if is_fp8 else cls(wide)

    def wide(self) -> torch.Tensor:
        """Return what the matrices stand for."""
        return self.values if self.scales is None else self.values.float() * self.scales

    def grouped(self, rows: Rows, counts: torch.Tensor) -> torch.Tensor:
        """Multiply each expert's block of expert-major rows by its matrix; nothing waits on CUDA."""
        if self.scales is None:
            return grouped_linear(rows[0], self.values.transpose(1, 2), None, counts)
        if not rows[0].is_cuda:  # where PyTorch has no such product
            return grouped_linear(dequantize(rows), self.wide().transpose(1, 2), None, counts).bfloat16()
        ends, scales = counts.cumsum(0).int(), (rows[1].squeeze(-1).contiguous(), self.scales.squeeze(-1))
        return torch._scaled_grouped_mm(  # noqa: SLF001  nothing public before PyTorch 2.10
            rows[0], self.values.transpose(1, 2), *scales, offs=ends, out_dtype=torch.bfloat16, use_fast_accum=True
        )

    def masked(self, rows: Rows) -> torch.Tensor:
        """Multiply all rows (num_experts, capacity, num_inputs) of each expert by its matrix, those in use or not."""
        if self.scales is None:
            return torch.bmm(rows[0], self.values.transpose(1, 2))
        if not rows[0].is_cuda:
            return torch.bmm(dequantize(rows), self.wide().transpose(1, 2)).bfloat16()
        scales = rows[1].squeeze(-1).contiguous(), self.scales.squeeze(-1)
        return torch._scaled_grouped_mm(  # noqa: SLF001
            rows[0], self.values.transpose(1, 2), *scales, out_dtype=torch.bfloat16, use_fast_accum=True
        )


@dataclass(frozen=True)
class DecodeExperts:
    """Some experts of a layer: ``down(silu(gate) * up)``, gate and up being the halves of one product."""

    up: Matrices  # (num_experts, 2 * moe_intermediate, hidden)
    down: Matrices  # (num_experts, hidden, moe_intermediate)

    @classmethod
    def draw(cls, job: DecodeJob, layer: int, experts: Sequence[int]) -> DecodeExperts:
        """Draw random weights, which do not depend on the number of ranks."""
        shape, dtype = job.shape, torch.float32 if job.dtype == "float32" else torch.bfloat16
        sizes = (2 * shape.moe_intermediate, shape.hidden), (shape.hidden, shape.moe_intermediate)
        up, down = (torch.empty(len(experts), *size, dtype=dtype, device=job.device) for size in sizes)
        for index, expert in enumerate(experts):
            seed = (job.seed * 65537 + layer) * _MAX_EXPERTS + expert
            generator = torch.Generator(job.device).manual_seed(seed)
            for matrix in (up[index], down[index]):
                matrix.normal_(0, _STD, generator=generator)
        return cls(*(Matrices.of(each, is_fp8=job.dtype == "fp8") for each in (up, down)))

    @property
    def is_fp8(self) -> bool:
        """Whether rows have scales."""
        return self.up.scales is not None

    def rows_of(self, x: torch.Tensor) -> Rows:
        """Return tokens (num_tokens, hidden) as rows that experts take."""
        return quantize_rows(x) if self.is_fp8 else (x,)

    def run(self, rows: Rows, counts: torch.Tensor) -> torch.Tensor:
        """Return the results of expert-major rows (num_rows, hidden), of which ``counts`` are each expert's."""
        return self.down.grouped(self._inner(self.up.grouped(rows, counts)), counts)

    def run_masked(self, rows: Rows) -> torch.Tensor:
        """Return the results of rows (num_experts, capacity, hidden); those that are not in use are undefined."""
        return self.down.masked(self._inner(self.up.masked(rows)))

    def _inner(self, hidden: torch.Tensor) -> Rows:
        gate, up = hidden.chunk(2, dim=-1)
        return self.rows_of(F.silu(gate) * up)


def reference_outputs(
    job: DecodeJob, layer: int, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor
) -> torch.Tensor:
    """Return the weighted sums of each token's experts, all computed here one after the other, summed in float32.

    ``x`` is (num_tokens, hidden), the other two are (num_tokens, num_topk).
    """
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in topk_idx.unique().tolist():  # type: ignore[no-untyped-call]
        experts = DecodeExperts.draw(job, layer, [expert])
        tokens, k = (topk_idx == expert).nonzero(as_tuple=True)
        rows = tuple(each[None] for each in experts.rows_of(x[tokens]))
        # In float32 on the CPU and the device alike: no product of another variant is the reference.
        up = torch.bmm(dequantize(rows).float(), experts.up.wide().float().transpose(1, 2))
        inner = experts._inner(up.to(x.dtype))  # noqa: SLF001  of this file
        y = torch.bmm(dequantize(inner).float(), experts.down.wide().float().transpose(1, 2))[0].to(x.dtype)
        out.index_add_(0, tokens, y.float() * topk_weights[tokens, k, None].float())
    return out.to(x.dtype)
