"""Rows of a rank's messages to other nodes: counted by the device, or one for each token where nearly all are sent."""

from __future__ import annotations

from fusco.core.errors import RowOverflowError
from fusco.core.recent import Recent
from fusco.core.rows import row_bytes
from fusco.cuda.context import CudaContext
from fusco.cuda.failure import own_backlog
from fusco.cuda.kernels.abi import ticket_after
from fusco.cuda.kernels.plan_forwarding import ForwardingSummary, ForwardingTerms
from fusco.cuda.tuning import MAX_EMPTY_BYTES
from fusco.engine.base import DispatchRequest
from fusco.planner.routing import Routing


class MessageRows:
    """Chooses and knows the rows of messages of one rank.

    The host must wait for counts, which takes longer than the network for a few rows that are not needed. So where the
    latest dispatch of as many tokens left few rows empty, an exactly sized one has a row for every token, too, and the
    host waits for nothing but its plan. This depends on earlier calls alone, not on timing. Where a node has several
    ranks, rows are always counted: they decide which ranks forward, and so the last bits of sums.
    """

    def __init__(self, context: CudaContext) -> None:
        self._context = context
        self.summary = ForwardingSummary(context.topology.num_nodes, context.node, context.library.device)
        self.ticket = 0  # of the latest exactly sized dispatch
        self._can_be_empty = context.topology.ranks_per_node == 1
        self._num_empty: Recent[tuple[int, ...], int] = Recent()  # in the latest dispatch of a routing's shape

    def pending_error(self) -> RowOverflowError | None:
        """Return and clear the error of a message of fixed size that was too small."""
        if (overflow := self.summary.take_overflow()) is None:
            return None
        return RowOverflowError(self._context.number, overflow.limit, overflow.num_tokens, overflow.node)

    def next_ticket(self) -> int:
        """Return the number of another exactly sized dispatch."""
        self.ticket = ticket_after(self.ticket)
        return self.ticket

    def terms_of(self, request: DispatchRequest) -> ForwardingTerms:
        """Return how many rows a dispatch may send to a node, and what happens beyond."""
        static, num_tokens = request.static, request.routing.num_tokens
        limit: int | None = num_tokens
        if static is not None:
            limit = num_tokens if static.max_rows_to_node is None else min(num_tokens, static.max_rows_to_node)
            return ForwardingTerms(limit, static.on_overflow == "raise", sends_invalid_ids=False, ticket=0)
        are_few = self.are_few_empty(request.routing.topk_idx.shape, sum(map(row_bytes, request.payloads)))
        limit = num_tokens if are_few else None
        return ForwardingTerms(limit, is_overflow_reported=False, sends_invalid_ids=are_few, ticket=self.next_ticket())

    def are_few_empty(self, shape: tuple[int, ...], row_bytes: int) -> bool:
        """Return whether so few rows were empty in the latest dispatch of this shape that they need not be counted."""
        num_empty = self._num_empty.use(shape) if self._can_be_empty else None
        return num_empty is not None and num_empty * row_bytes <= MAX_EMPTY_BYTES

    def published(self, routing: Routing, terms: ForwardingTerms) -> list[int]:
        """Return the rows for each node, 0 for this one; ``ValueError`` for an invalid id if they are counted.

        Only counts are waited for.
        """
        if terms.max_rows is None:
            return self._count(routing, terms.ticket)
        return [terms.max_rows * (node != self._context.node) for node in range(self.summary.num_nodes)]

    def num_empty(self, shape: tuple[int, ...], ticket: int) -> int:
        """Return how many rows without a token all messages have if each has a row for every token; no wait.

        The plan of the dispatch must have been waited for.
        """
        num_sent = self.summary.num_sent(ticket)
        num_empty = self._num_empty[shape] = shape[0] * (self.summary.num_nodes - 1) - num_sent
        return num_empty

    def _count(self, routing: Routing, ticket: int) -> list[int]:
        summary = self.summary
        self._context.watchdog.wait_until(
            lambda: summary.is_of(ticket), lambda: own_backlog("the number of rows for each node")
        )
        if summary.bad_pair != routing.topk_idx.numel():
            token, k = divmod(summary.bad_pair, routing.num_topk)
            raise ValueError(self._context.describe_invalid_id(token, k, summary.bad_id))
        return summary.num_rows_to_node
