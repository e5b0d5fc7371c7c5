"""Rows of this node's ranks: publish their numbers, and scatter them into their slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fusco.core.config import Launch
from fusco.core.profile import Call
from fusco.core.rows import row_bytes
from fusco.cuda.context import CudaContext
from fusco.cuda.device_plan import DevicePlan
from fusco.cuda.kernels.abi import Payload
from fusco.cuda.kernels.held_rows import HeldRows
from fusco.cuda.kernels.scatter_rows import scatter_rows


@dataclass(frozen=True)
class PublishedRows:
    """Numbers of rows that a rank dispatches, as other ranks need them.

    Attributes:
        num_tokens: of the rank.
        num_rows_to_node: tokens for each other node; empty if there is one node, or with an earlier plan.

    """

    num_tokens: int
    num_rows_to_node: tuple[int, ...] = ()

    def pack(self) -> list[int]:
        """Return the counts of a record."""
        return [self.num_tokens, *self.num_rows_to_node]

    @classmethod
    def unpack(cls, counts: Sequence[int]) -> PublishedRows:
        """Return the inverse of ``pack``."""
        num_tokens, *num_rows_to_node = counts
        return cls(num_tokens, tuple(num_rows_to_node))


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """Rows that one call moves, once all ranks have agreed.

    Attributes:
        payloads: rows of this rank, aligned.
        published: published by each rank of the group.
        launch: launch options.
        stream: the stream for all launches.
        call: counts times and SMs.

    """

    payloads: Sequence[torch.Tensor]
    published: Sequence[PublishedRows]
    launch: Launch
    stream: torch.cuda.Stream
    call: Call


class OwnRows:
    """Scatters rows within the node."""

    def __init__(self, context: CudaContext) -> None:
        self._context, self._arena = context, context.arena

    def scatter(self, plan: DevicePlan, held: HeldRows, transfer: Transfer) -> list[torch.Tensor]:
        """Return the outputs, filled with the tokens of this node's ranks."""
        outputs = [payload.new_empty(plan.num_slots, *payload.shape[1:]) for payload in transfer.payloads]
        moved = [
            Payload(address=payload.data_ptr(), row_bytes=row_bytes(payload), output_address=output.data_ptr())
            for payload, output in zip(transfer.payloads, outputs, strict=True)
        ]
        self.scatter_held(plan, held, moved, transfer, clears_padding=True)
        return outputs

    def scatter_held(
        self,
        plan: DevicePlan,
        held: HeldRows,
        payloads: Sequence[Payload],
        transfer: Transfer,
        *,
        clears_padding: bool,
    ) -> None:
        """Scatter rows that the ranks of the node hold: their own, or those that they forward."""
        sizes, counts = [payload.row_bytes for payload in payloads], held.num_rows_of_ranks
        received_offset = self._arena.layout.received_offset
        received = [[received_offset(r, n, sizes, p) for p in range(len(sizes))] for r, n in enumerate(counts)]
        launcher = self._context.launcher(transfer.stream)
        with self._context.timeline.span("scatter", "rows", transfer.stream):
            num_sms = scatter_rows(
                launcher,
                plan,
                held,
                payloads,
                received,
                clears_padding=clears_padding,
                num_sms=transfer.launch.num_sms,
            )
        transfer.call.profile.count_sms(num_sms)
