"""Rows of this node's ranks: publish their numbers, and scatter them into their slots."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import torch

from fusco.core.config import Launch
from fusco.core.profile import Call
from fusco.core.recent import Recent
from fusco.core.rows import expert_rows_shape, row_bytes
from fusco.cuda.context import CudaContext
from fusco.cuda.kernels.abi import Payload
from fusco.cuda.kernels.held_rows import HeldRows
from fusco.cuda.kernels.launcher import PreparedLaunch
from fusco.cuda.kernels.scatter_rows import OwnRouting, ScatterTerms, scatter_rows
from fusco.cuda.within_node.device_plan import DevicePlan


@dataclass(kw_only=True)
class Transfer:
    """Rows that one call moves, once all ranks have agreed."""

    payloads: Sequence[torch.Tensor]  # rows of this rank, aligned
    launch: Launch  # launch options
    stream: torch.cuda.Stream  # the stream for all launches
    call: Call  # counts times and SMs
    launched: list[PreparedLaunch] = field(default_factory=list)  # the kernels launched so far

    def __post_init__(self) -> None:
        self.row_bytes = tuple(map(row_bytes, self.payloads))


class Planning(NamedTuple):
    """Plan of rows that is launched right before they are scattered."""

    launch: Callable[[], object]  # launches it
    # the routing of this rank if rows are pushed while the plan is made; see ``OwnRouting``
    topk_idx: torch.Tensor | None


class OwnRows:
    """Scatters rows within the node."""

    def __init__(self, context: CudaContext) -> None:
        self._context = context
        self._known_offsets: Recent[tuple[tuple[int, ...], tuple[int, ...]], list[int]] = Recent()

    def scatter(
        self,
        plan: DevicePlan,
        held: HeldRows,
        transfer: Transfer,
        num_slots: int | None = None,
        planning: Planning | None = None,
    ) -> list[torch.Tensor]:
        """Return the outputs, filled with the tokens of this node's ranks.

        They have ``num_slots`` rows, by default those of the plan. If the plan is not launched yet, ``planning``
        launches it, as late as possible: the device should not be idle between the two.
        """
        if num_slots is None:
            num_slots = plan.num_slots
        shape = expert_rows_shape(num_slots, plan.rows_per_expert)
        outputs = [payload.new_empty(*shape, *payload.shape[1:]) for payload in transfer.payloads]
        moved = [
            Payload(payload.data_ptr(), size, output.data_ptr(), num_slots)
            for payload, size, output in zip(transfer.payloads, transfer.row_bytes, outputs, strict=True)
        ]
        if planning:
            planning.launch()
        self.scatter_held("own rows", plan, held, moved, transfer, planning.topk_idx if planning else None)
        return outputs

    def scatter_held(
        self,
        what: str,
        plan: DevicePlan,
        held: HeldRows,
        payloads: Sequence[Payload],
        transfer: Transfer,
        topk_idx: torch.Tensor | None = None,
    ) -> None:
        """Scatter rows that the ranks of the node hold: ``"own rows"`` first, then slices that they forward.

        ``topk_idx`` is their routing if they are pushed while their plan, the launch before this one, is made.
        """
        context, received = self._context, self._received(held.first_row, transfer.row_bytes)
        routing = None if topk_idx is None else OwnRouting(topk_idx, context.tables.expert_to_rank)
        terms = ScatterTerms(what == "own rows", transfer.launch.num_sms, routing)
        arguments = (context.launcher(transfer.stream), plan, held, payloads, received, terms)
        launched = context.timeline.timed("scatter", what, transfer.stream, scatter_rows, *arguments)
        transfer.launched.append(launched)
        transfer.call.profile.count_sms(launched.grid)

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
