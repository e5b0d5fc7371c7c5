"""Rows of this node's ranks: publish their numbers, and scatter them into their slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from fusco.core.config import Launch
from fusco.core.profile import Call
from fusco.core.recent import Recent
from fusco.core.rows import expert_rows_shape, row_bytes
from fusco.cuda.context import CudaContext
from fusco.cuda.kernels.abi import Memory, Payload
from fusco.cuda.kernels.held_rows import HeldRows
from fusco.cuda.kernels.launcher import KernelCall
from fusco.cuda.kernels.plan import PlannedRows
from fusco.cuda.kernels.scatter_rows import OwnRouting, ScatterTerms, scatter_rows
from fusco.cuda.within_node.device_plan import DevicePlan


@dataclass(kw_only=True)
class Transfer:
    """Rows that one call moves, once all ranks have agreed."""

    payloads: Sequence[torch.Tensor]  # rows of this rank, aligned
    launch: Launch  # launch options
    stream: torch.cuda.Stream  # the stream for all launches
    call: Call  # counts times and SMs

    def __post_init__(self) -> None:
        self.row_bytes = tuple(map(row_bytes, self.payloads))


class OwnRows:
    """Scatters rows within the node."""

    def __init__(self, context: CudaContext) -> None:
        self._context = context
        self._known_offsets: Recent[tuple[tuple[int, ...], tuple[int, ...]], list[int]] = Recent()

    def scatter(
        self, plan: DevicePlan, held: HeldRows, transfer: Transfer, num_slots: int | None = None
    ) -> list[torch.Tensor]:
        """Return the outputs, filled with the tokens of this node's ranks.

        They have ``num_slots`` rows, by default those of the plan.
        """
        if num_slots is None:
            num_slots = plan.num_slots
        shape = expert_rows_shape(num_slots, plan.rows_per_expert)
        outputs = [payload.new_empty(*shape, *payload.shape[1:]) for payload in transfer.payloads]
        moved = [
            Payload(payload.data_ptr(), size, output.data_ptr(), num_slots)
            for payload, size, output in zip(transfer.payloads, transfer.row_bytes, outputs, strict=True)
        ]
        self.scatter_held("own rows", plan, held, moved, transfer)
        return outputs

    def scatter_held(
        self, what: str, plan: DevicePlan, held: HeldRows, payloads: Sequence[Payload], transfer: Transfer
    ) -> None:
        """Scatter rows that the ranks of the node hold: ``"own rows"`` first, then slices that they forward."""
        stream, num_sms = transfer.stream, transfer.launch.num_sms
        call = self.call(plan, held, payloads, stream, num_sms, clears_padding=what == "own rows")
        self._context.timeline.timed("scatter", what, stream, call.launch, stream.cuda_stream)
        transfer.call.profile.count_sms(call.grid)

    def call(
        self,
        plan: PlannedRows,
        held: HeldRows,
        payloads: Sequence[Payload],
        stream: torch.cuda.Stream,
        num_sms: int | None,
        *,
        clears_padding: bool = True,
        topk_idx: Memory | None = None,
    ) -> KernelCall:
        """Return the kernel that scatters rows.

        ``topk_idx`` is their routing if they are pushed while their plan, the launch before this one, is made.
        """
        context, received = self._context, self._received(held.first_row, tuple(of.row_bytes for of in payloads))
        routing = None if topk_idx is None else OwnRouting(topk_idx, context.tables.expert_to_rank)
        terms = ScatterTerms(clears_padding, num_sms, routing)
        return scatter_rows(context.launcher(stream), plan, held, payloads, received, terms)

    def _received(self, first_row: tuple[int, ...], row_bytes: tuple[int, ...]) -> list[int]:
        """Return the offsets of all payloads of the rows that ranks push, rank by rank."""
        key = (first_row, row_bytes)
        offsets = self._known_offsets.use(key)
        if offsets is None:
            layout, sizes = self._context.layout, list(row_bytes)
            offsets = self._known_offsets[key] = [
                layout.received_offset(src, end - first, sizes, p)
                for src, (first, end) in enumerate(pairwise(first_row))
                for p in range(len(sizes))
            ]
        return offsets
