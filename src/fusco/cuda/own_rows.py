"""Rows of this node's ranks: publish their addresses, stage them in the pool, scatter them into their slots."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from fusco.core.config import Launch
from fusco.core.profile import Call
from fusco.core.rows import row_bytes
from fusco.cuda.context import CudaContext
from fusco.cuda.device_plan import DevicePlan
from fusco.cuda.kernels.abi import Payload
from fusco.cuda.kernels.held_rows import HeldRows
from fusco.cuda.kernels.scatter_rows import is_staged, scatter_rows
from fusco.cuda.kernels.stage_rows import stage_rows

_STAGED = -1  # no buffer: rows are staged in the pool


@dataclass(frozen=True)
class PublishedRows:
    """Location and counts of the rows that a rank dispatches, as other ranks need them.

    Attributes:
        num_tokens: of the rank.
        buffer: index of the peer-visible buffer that holds the rows; -1 if they are staged in the pool.
        offset: byte offset of the rows in the buffer.
        num_rows_to_node: tokens for each other node; empty if there is one node, or with an earlier plan.

    """

    num_tokens: int
    buffer: int
    offset: int
    num_rows_to_node: tuple[int, ...] = ()

    @property
    def is_in_buffer(self) -> bool:
        """True if peers read the rows in place, from the caller's tensor."""
        return self.buffer != _STAGED

    def pack(self) -> list[int]:
        """Return the counts of a record."""
        return [self.num_tokens, self.buffer, self.offset, *self.num_rows_to_node]

    @classmethod
    def unpack(cls, counts: Sequence[int]) -> PublishedRows:
        """Return the inverse of ``pack``."""
        num_tokens, buffer, offset, *num_rows_to_node = counts
        return cls(num_tokens, buffer, offset, tuple(num_rows_to_node))


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
    """Publishes, stages and scatters rows within the node."""

    def __init__(self, context: CudaContext, staging_stream: torch.cuda.Stream) -> None:
        self._context, self._arena, self._staging_stream = context, context.arena, staging_stream
        self._may_stage, self._has_staged = torch.cuda.Event(), torch.cuda.Event()

    def publish(
        self, num_tokens: int, payloads: Sequence[torch.Tensor], num_rows_to_node: Sequence[int] = ()
    ) -> PublishedRows:
        """Return where peers find the rows: in a peer-visible buffer, or in the pool."""
        buffer, offset = _STAGED, 0
        if len(payloads) == 1 and payloads[0].numel():
            buffer, offset = self._arena.place_of(payloads[0])
        return PublishedRows(num_tokens, buffer, offset, tuple(num_rows_to_node))

    @contextmanager
    def staging(self, transfer: Transfer) -> Iterator[int]:
        """Copy rows into the pool, concurrently with work launched inside; rows in place are not copied.

        Yields the number of SMs that it takes.
        """
        payloads, stream, context = transfer.payloads, transfer.stream, self._context
        if not self._is_staged(transfer.published[self._arena.rank]):
            yield 0
            return
        with transfer.call.profile.spend("staging"):
            moved = [Payload(address=payload.data_ptr(), row_bytes=row_bytes(payload)) for payload in payloads]
            num_tokens, sizes = len(payloads[0]), [payload.row_bytes for payload in moved]
            offsets = [self._arena.layout.pool_offset(num_tokens, sizes, p) for p in range(len(moved))]
            pools = [self._arena.address(self._arena.local, 0, offset) for offset in offsets]
            self._may_stage.record(stream)
            self._staging_stream.wait_event(self._may_stage)
            with context.timeline.span("stage", "own rows", self._staging_stream):
                launcher = context.launcher(self._staging_stream)
                num_sms = stage_rows(launcher, moved, pools, num_tokens, transfer.launch.num_sms)
            transfer.call.profile.count_sms(num_sms)
        yield num_sms
        self._has_staged.record(self._staging_stream)
        stream.wait_event(self._has_staged)

    def scatter(self, plan: DevicePlan, held: HeldRows, transfer: Transfer, staging_sms: int) -> list[torch.Tensor]:
        """Return the outputs, filled with the tokens of this node's ranks, while staging takes ``staging_sms``."""
        outputs = [payload.new_empty(plan.num_slots, *payload.shape[1:]) for payload in transfer.payloads]
        moved = [
            Payload(address=payload.data_ptr(), row_bytes=row_bytes(payload), output_address=output.data_ptr())
            for payload, output in zip(transfer.payloads, outputs, strict=True)
        ]
        sizes = [payload.row_bytes for payload in moved]
        rows, in_place_ranks = [], 0
        for local, rank in enumerate(self._arena.node_ranks):
            of_rank = transfer.published[rank]
            if local == self._arena.local:
                rows.append([payload.address for payload in moved])
            elif not self._is_staged(of_rank):
                rows.append([self._arena.address(local, of_rank.buffer, of_rank.offset)])
            else:
                starts = [self._arena.layout.pool_offset(of_rank.num_tokens, sizes, p) for p in range(len(sizes))]
                rows.append([self._arena.address(local, 0, start) for start in starts])
            in_place_ranks |= (not self._is_staged(of_rank)) << local
        launcher = self._context.launcher(transfer.stream)
        with self._context.timeline.span("scatter", "own rows"):
            num_sms = scatter_rows(
                launcher,
                plan,
                held,
                moved,
                rows,
                in_place_ranks=in_place_ranks,
                clears_padding=True,
                num_sms=transfer.launch.num_sms,
            )
        transfer.call.profile.count_sms(num_sms + staging_sms if is_staged(launcher, in_place_ranks) else num_sms)
        return outputs

    def _is_staged(self, published: PublishedRows) -> bool:
        """Return whether a rank of this node copies its rows into the pool; without peers no rank does."""
        return not published.is_in_buffer and len(self._arena.node_ranks) > 1
