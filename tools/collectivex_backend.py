"""CollectiveX: fusco as a backend of SemiAnalysis's benchmark of expert-parallel communication.

For InferenceX at 843c625: ``collectivex.py`` runs its harness and its oracle with this class. Rows arrive by
local expert in both modes. In *normal* mode the oracle reads one row of each token, and combine adds rows up; in
*low-latency* mode rows are masked, and combine applies the weights. Source of the interface:
``experimental/CollectiveX/bench/ep_backend.py`` and ``ep_harness.py`` (Apache licence).
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from ep_backend import EPBackend

from fusco.api.communicator import Communicator
from fusco.api.handle import Dispatched
from fusco.core.config import Settings, StaticRows
from fusco.core.quantization import Quantize, dequantize_rows
from fusco.core.version import __version__
from fusco.cpu.kernels.quantize_rows import quantize_rows


@dataclass
class SentTokens:
    """What the harness passes from call to call."""

    sent: Dispatched
    combine_input: torch.Tensor | None = None
    places: torch.Tensor | None = None  # of the rows that the oracle reads


class FuscoBackend(EPBackend):
    """Dispatch and combine of a communicator of the default process group."""

    name = "fusco"
    maturity = "candidate"
    library_version = __version__
    kernel_generation = "fusco"
    SUPPORTED_MODES = ("normal", "low-latency")
    SUPPORTED_PRECISIONS = ("bf16", "fp8")

    def __init__(self, args: Any, rank: int, world_size: int, local_rank: int, device: torch.device) -> None:
        super().__init__(args, rank, world_size, local_rank, device)
        self._num_local = args.experts // world_size
        self._static: StaticRows | None = None
        self._quantize = Quantize() if args.precision == "fp8" else None
        if self._quantize:
            self.stage_device_work, self.dispatch_dtype = True, "fp8-e4m3fn"
            widths = self._quantize.widths(args.hidden)
            self.dispatch_value_bytes, self.dispatch_scale_bytes_per_copy = 1, 4 * widths.scales
        if args.mode == "low-latency":
            self.receive_layout, self.combine_weight_semantics = "token-expert", "weighted-kernel-sum"

    def create_buffer(self, spec: Any) -> None:
        """Make the communicator, with room for ``spec.max_tokens_per_rank``; a collective."""
        is_masked = self.mode == "low-latency"
        if is_masked:
            self._static = StaticRows(rows_per_expert=spec.max_tokens_per_rank * self.world_size)
        self._comm = Communicator(
            num_experts=self.args.experts,
            num_topk=self.args.topk,
            max_tokens_per_rank=spec.max_tokens_per_rank,
            hidden=self.args.hidden,
            ranks_per_node=min(self.args.scale_up_domain, self.world_size),
            # The oracle of weighted sums knows no partial sums, which 16 bits round.
            settings=Settings(wire_dtype=torch.float32 if is_masked else None),
            device=self.device,
        )

    def dispatch(self, problem: Any) -> SentTokens:
        """Send the tokens, bfloat16 (num_tokens, hidden), to their experts."""
        sent = self._comm.dispatch(
            problem.dispatch_x,
            problem.topk_idx,
            problem.topk_weights,
            with_weights=self._static is None,
            static=self._static,
            quantize=self._quantize,
        )
        return SentTokens(sent)

    def stage(self, problem: Any, handle: SentTokens) -> None:
        """Take the rows that arrived for results of experts, FP8 as bfloat16."""
        handle.combine_input = self._rows_of(handle)

    def combine(self, problem: Any, handle: SentTokens) -> torch.Tensor:
        """Return the sums of each token's rows, bfloat16 (num_tokens, hidden)."""
        assert handle.combine_input is not None, "stage comes before combine"
        return self._comm.combine(handle.combine_input, handle.sent.handle, weights="topk" if self._static else None)

    def recv_tokens(self, handle: SentTokens) -> int:
        """Return the tokens that came here; in low-latency mode their rows."""
        return len(self._view(handle).payload)

    def inspect_dispatch(self, problem: Any, handle: SentTokens) -> SimpleNamespace:
        """Return what the oracle of the mode reads: payload, experts, weights and counts."""
        return self._view(handle)

    def combine_transformed(self, problem: Any, handle: SentTokens, transformed: torch.Tensor) -> torch.Tensor:
        """Combine results of the oracle's experts, of the rows that it was shown; other rows are zero."""
        rows = transformed.new_zeros(*handle.sent.handle.rows_shape, transformed.shape[1])
        rows[handle.places] = transformed
        handle.combine_input = rows
        return self.combine(problem, handle)

    def semantic_payload(self, x: torch.Tensor) -> torch.Tensor:
        """Return the bfloat16 rows that FP8 values and scales of rows stand for; both are computed on the host."""
        if self._quantize is None:
            return x
        rows, widths = x.cpu().contiguous(), self._quantize.widths(x.shape[1])
        sizes = widths.values, 4 * widths.scales
        values, scales = (torch.empty(len(x), size, dtype=torch.uint8, device="cpu") for size in sizes)
        quantize_rows(rows, self._quantize, values, scales)
        codes, of_blocks = values.view(torch.float8_e4m3fn), scales.view(torch.float32)
        return dequantize_rows(codes, of_blocks, self._quantize, x.dtype).to(x.device)

    def finalize(self, rc: int) -> int:
        """Close the communicator and the process group; return the exit code."""
        self._comm.close()
        return int(super().finalize(rc))

    def _rows_of(self, handle: SentTokens) -> torch.Tensor:
        return handle.sent.dequantize() if self._quantize else handle.sent.rows

    def _view(self, handle: SentTokens) -> SimpleNamespace:
        rows, counts = self._rows_of(handle), handle.sent.num_rows_per_expert
        if self._static:
            handle.places = torch.arange(rows.shape[1], device=rows.device) < counts[:, None]
            experts = self._experts_of(counts)
            return SimpleNamespace(payload=rows[handle.places], expert_ids=experts, local_expert_counts=counts)
        # A token's rows come together, in order of expert: the first is shown, and the experts of all.
        sources = handle.sent.handle.plan.slot_to_source
        _, token_of = torch.unique(sources, dim=0, return_inverse=True)
        order = token_of.argsort(stable=True)
        tokens = token_of[order]
        starts = tokens.diff(prepend=tokens.new_tensor([-1])).nonzero()[:, 0]
        columns = torch.arange(len(order), device=rows.device) - starts[tokens]
        ids = counts.new_full((len(starts), self.args.topk), -1)
        ids[tokens, columns] = self._experts_of(counts)[order]
        weights = torch.zeros(ids.shape, dtype=torch.float32, device=rows.device)
        assert handle.sent.weights is not None
        weights[tokens, columns] = handle.sent.weights[order]
        handle.places = order[starts]
        return SimpleNamespace(payload=rows[handle.places], expert_ids=ids, weights=weights, local_expert_counts=counts)

    def _experts_of(self, counts: torch.Tensor) -> torch.Tensor:
        """Return the expert of each row, in order of local expert."""
        first = self.rank * self._num_local
        return torch.arange(first, first + len(counts), device=counts.device).repeat_interleave(counts)
