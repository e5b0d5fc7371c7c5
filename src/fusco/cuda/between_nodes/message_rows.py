"""Messages of a rank to other nodes: routing, and rows, counted by the device or one for each token."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fusco.core.errors import RowOverflowError
from fusco.core.recent import Recent
from fusco.core.rows import row_bytes
from fusco.cuda.between_nodes.nccl import Message
from fusco.cuda.context import CudaContext
from fusco.cuda.failure import own_backlog
from fusco.cuda.kernels.abi import Memory, MemoryAt, ticket_after
from fusco.cuda.kernels.plan_forwarding import ForwardingSummary, ForwardingTerms
from fusco.cuda.tuning import MAX_EMPTY_BYTES
from fusco.engine.base import DispatchRequest
from fusco.planner.internode import InternodeTraffic
from fusco.planner.routing import Routing

_ALIGNMENT = 16


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


class RoutingMessages:
    """Routing sent to and received from the counterparts of a rank. Must live until all messages have been sent."""

    def __init__(
        self, routing: Routing, packed: torch.Tensor, traffic: InternodeTraffic, received: torch.Tensor | None = None
    ) -> None:
        """Prepare the messages of this rank's routing, ``packed`` by ``plan_forwarding``.

        ``received`` is memory of the caller for what is received, uint8.
        """
        topology, rank, weights = traffic.lanes.topology, traffic.rank, routing.topk_weights
        self._routing, self._packed = routing, packed
        remotes, local = topology.remote_nodes(rank), topology.rank_to_local[rank]
        peers = [topology.node_to_ranks[remote][local] for remote in remotes]
        # Ids are int32 and last, as they are no wider than weights: so both are aligned without a gap.
        self._weight_bytes = 0 if weights is None else routing.num_topk * weights.element_size()
        row_bytes = self._weight_bytes + routing.num_topk * 4
        self._num_incoming = [traffic.num_rows[peer][traffic.node] for peer in peers]
        most = max(1, -(-max(self._num_incoming) * row_bytes // _ALIGNMENT)) * _ALIGNMENT
        shape = len(peers), most
        self._incoming = packed.new_empty(shape) if received is None else first_messages(received, *shape)
        outgoing = [traffic.num_rows[rank][remote] * row_bytes for remote in remotes]
        incoming = [num_rows * row_bytes for num_rows in self._num_incoming]
        self.sends = _messages(peers, self._packed, outgoing)
        self.receives = _messages(peers, self._incoming, incoming)

    @property
    def memory(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The routing that is sent, and memory for what is received."""
        return self._packed, self._incoming

    @property
    def received(self) -> list[tuple[Memory, Memory | None]]:
        """Ids and weights that are received."""
        own = self._routing
        known: list[tuple[Memory, Memory | None]] = []
        for i, num_rows in enumerate(self._num_incoming):
            at = self._incoming.data_ptr() + i * self._incoming.shape[1]
            weights = None if own.topk_weights is None else MemoryAt(at, own.topk_weights.element_size())
            known.append((MemoryAt(at + num_rows * self._weight_bytes, 4), weights))
        return known


def first_messages(memory: torch.Tensor, num_messages: int, num_bytes: int) -> torch.Tensor:
    """Return room for messages at the beginning of memory, uint8 (num_messages, num_bytes)."""
    return memory[: num_messages * num_bytes].view(num_messages, num_bytes)


def _messages(peers: Sequence[int], memory: torch.Tensor, sizes: Sequence[int]) -> list[Message]:
    """Return the messages in the rows of ``memory`` to or from each peer, except for empty ones."""
    places = range(memory.data_ptr(), memory.data_ptr() + memory.nbytes, memory.shape[1])
    return [Message(peer, place, size) for peer, place, size in zip(peers, places, sizes, strict=True) if size]
