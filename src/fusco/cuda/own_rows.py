"""Rows of this node's ranks: publish their addresses, stage them in the pool, scatter them into their slots."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import NamedTuple

import torch

from fusco.core.config import Launch
from fusco.core.profile import Call
from fusco.core.recent import Recent
from fusco.core.rows import row_bytes, wants_grad
from fusco.cuda.context import CudaContext
from fusco.cuda.device_plan import DevicePlan
from fusco.cuda.kernels.abi import Payload
from fusco.cuda.kernels.held_rows import Rows
from fusco.cuda.kernels.scatter_rows import scatter_rows
from fusco.cuda.kernels.stage_rows import stage_rows
from fusco.cuda.output_bound import affordable_bound
from fusco.engine.base import DispatchRequest

_STAGED = -1  # no buffer: rows are staged in the pool


class PublishedRows(NamedTuple):
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

    def pack(self) -> tuple[int, ...]:
        """Return the counts of a record."""
        return (self.num_tokens, self.buffer, self.offset, *self.num_rows_to_node)

    @staticmethod
    @lru_cache(maxsize=1024)
    def unpack(counts: tuple[int, ...]) -> PublishedRows:
        """Return the inverse of ``pack``."""
        num_tokens, buffer, offset, *num_rows_to_node = counts
        return PublishedRows(num_tokens, buffer, offset, tuple(num_rows_to_node))


@dataclass(kw_only=True)
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

    def __post_init__(self) -> None:
        self.row_bytes = tuple(map(row_bytes, self.payloads))


class OwnRows:
    """Publishes, stages and scatters rows within the node."""

    def __init__(self, context: CudaContext, staging_stream: torch.cuda.Stream) -> None:
        self._context, self._arena, self._staging_stream = context, context.arena, staging_stream
        self._may_stage, self._has_staged = torch.cuda.Event(), torch.cuda.Event()
        self._is_alone = len(self._arena.node_ranks) == 1
        self._known_pools: Recent[tuple[int, int, tuple[int, ...]], list[int]] = Recent()

    def publish(
        self, num_tokens: int, payloads: Sequence[torch.Tensor], num_rows_to_node: Sequence[int] = ()
    ) -> PublishedRows:
        """Return where peers find the rows: in a peer-visible buffer, or in the pool."""
        buffer, offset = _STAGED, 0
        if self._arena.has_buffers and len(payloads) == 1 and payloads[0].numel():
            buffer, offset = self._arena.place_of(payloads[0])
        return PublishedRows(num_tokens, buffer, offset, tuple(num_rows_to_node))

    def stage(self, transfer: Transfer) -> int:
        """Begin to copy rows into the pool, unless peers read them in place; return the number of SMs that it takes.

        ``join`` ends it. What is launched in between is concurrent.
        """
        payloads, stream, context = transfer.payloads, transfer.stream, self._context
        if self._is_alone or not self._is_staged(transfer.published[self._arena.rank]):
            return 0
        with transfer.call.profile.spend("staging"):
            sizes = transfer.row_bytes
            moved = [Payload(payload.data_ptr(), size) for payload, size in zip(payloads, sizes, strict=True)]
            num_tokens = len(payloads[0])
            self._may_stage.record(stream)
            self._staging_stream.wait_event(self._may_stage)
            with context.timeline.span("stage", "own rows", self._staging_stream):
                launcher, pools = (
                    context.launcher(self._staging_stream),
                    self._pools(self._arena.local, num_tokens, sizes),
                )
                num_sms = stage_rows(launcher, moved, pools, num_tokens, transfer.launch.num_sms)
            transfer.call.profile.count_sms(num_sms)
        return num_sms

    def join(self, transfer: Transfer, staging_sms: int) -> None:
        """Have the transfer's stream wait for ``stage``, which returned ``staging_sms``."""
        if staging_sms:
            self._has_staged.record(self._staging_stream)
            transfer.stream.wait_event(self._has_staged)

    @contextmanager
    def staging(self, transfer: Transfer) -> Iterator[int]:
        """Stage rows, concurrently with work launched inside. Yields the number of SMs that it takes."""
        staging_sms = self.stage(transfer)
        yield staging_sms
        self.join(transfer, staging_sms)

    def scatter(
        self,
        plan: DevicePlan,
        held: Rows,
        transfer: Transfer,
        staging_sms: int,
        num_slots: int | None = None,
        launch_plan: Callable[[], None] | None = None,
    ) -> list[torch.Tensor]:
        """Return the outputs, filled with the tokens of this node's ranks, while staging takes ``staging_sms``.

        They have ``num_slots`` rows, by default those of the plan. If the plan is not launched yet, ``launch_plan``
        launches it. It is called as late as possible, since the device should not be idle between the two.
        """
        if num_slots is None:
            num_slots = plan.num_slots
        outputs = [payload.new_empty(num_slots, *payload.shape[1:]) for payload in transfer.payloads]
        moved = [
            Payload(payload.data_ptr(), size, output.data_ptr(), num_slots)
            for payload, size, output in zip(transfer.payloads, transfer.row_bytes, outputs, strict=True)
        ]
        rows, in_place_ranks = self._sources(transfer)
        launcher, num_sms = self._context.launcher(transfer.stream), transfer.launch.num_sms
        launch = partial(scatter_rows, in_place_ranks=in_place_ranks, clears_padding=True, num_sms=num_sms)
        if launch_plan:
            launch_plan()
        num_sms = self._context.timeline.timed("scatter", "own rows", None, launch, launcher, plan, held, moved, rows)
        transfer.call.profile.count_sms(num_sms + staging_sms)
        return outputs

    def _sources(self, transfer: Transfer) -> tuple[list[int], int]:
        """Return the addresses of all ranks' payloads, rank by rank, and a bit for each rank that stages none."""
        if self._is_alone:
            return [payload.data_ptr() for payload in transfer.payloads], 1
        arena, rows, in_place_ranks = self._arena, [], 0
        for local, rank in enumerate(arena.node_ranks):
            of_rank = transfer.published[rank]
            is_staged = self._is_staged(of_rank)
            in_place_ranks |= (not is_staged) << local
            if local == arena.local:
                rows += [payload.data_ptr() for payload in transfer.payloads]
            elif is_staged:
                rows += self._pools(local, of_rank.num_tokens, transfer.row_bytes)
            else:
                rows.append(arena.address(local, of_rank.buffer, of_rank.offset))
        return rows, in_place_ranks

    def _pools(self, local: int, num_tokens: int, sizes: tuple[int, ...]) -> list[int]:
        """Return where the pool of a rank of the node has each payload."""
        key = (local, num_tokens, sizes)
        pools = self._known_pools.get(key)
        if pools is None:
            offsets = [self._arena.layout.pool_offset(num_tokens, list(sizes), p) for p in range(len(sizes))]
            pools = self._known_pools[key] = [self._arena.address(local, 0, offset) for offset in offsets]
        return pools

    def _is_staged(self, published: PublishedRows) -> bool:
        """Return whether a rank of this node copies its rows into the pool; without peers no rank does."""
        return not (published.is_in_buffer or self._is_alone)


def affordable_bound_of(plan: DevicePlan, request: DispatchRequest, transfer: Transfer) -> int | None:
    """Return the rows of an output that is large enough for any plan of this size; see ``affordable_bound``."""
    num_pairs, num_local_experts = plan.first_row[-1] * plan.num_topk, plan.tables.num_local_experts
    needs_grad = wants_grad(request.payloads[0])  # of several payloads none does
    return affordable_bound(
        num_pairs,
        num_local_experts,
        request.expert_alignment,
        len(transfer.published),
        sum(transfer.row_bytes),
        needs_grad=needs_grad,
    )
