"""Exchange of routing: between counterparts of different nodes, then through the node's shared memory.

Routing and rows of a small dispatch go to other nodes with its record, as an attachment: so a dispatch waits once, as
within a node. It goes to the counterpart, so nothing can balance what the ranks send; it is for few bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from fusco.control.node_memory import wait_for_flag
from fusco.control.record_round import Attachment
from fusco.control.transport import Ticket, Transport
from fusco.control.watchdog import Watchdog
from fusco.core.errors import Stall
from fusco.core.lanes import IntArray
from fusco.core.profile import CallProfile
from fusco.cpu.kernels.gather_rows import gather_parts
from fusco.cpu.kernels.segment_memory import concatenate
from fusco.cpu.memory import CpuMemory
from fusco.planner.dispatch_plan import NodeForwarding, NodeRouting
from fusco.planner.routing import Routing, routing_bytes_per_row


class RoutingExchange:
    """Exchanges routing, so that every rank of a node has the routing of all tokens that the node needs."""

    def __init__(self, memory: CpuMemory, transport: Transport, watchdog: Watchdog) -> None:
        self._memory, self._transport, self._watchdog = memory, transport, watchdog
        self._layout, self._topology = memory.layout, memory.layout.topology
        self._remote_nodes = self._topology.remote_nodes(memory.rank)

    def publish(self, routing: Routing) -> None:
        """Copy this rank's routing to where its node reads it. This rank's record, which follows, announces it."""
        memory, shape = self._memory, (routing.num_tokens, routing.num_topk)
        memory.ids(memory.local, memory.node, *shape).copy_(routing.topk_idx)
        if (weights := routing.topk_weights) is not None:
            memory.weights(memory.local, memory.node, shape, weights.dtype).copy_(weights.detach())

    def exchange(
        self,
        collective: int,
        routing: Routing,
        forwarding: NodeForwarding,
        num_tokens_to_node: Sequence[Sequence[int]],
        profile: CallProfile,
    ) -> NodeRouting:
        """Return the routing of every token that this node needs; all ranks have published theirs.

        ``routing`` and ``forwarding`` are this rank's; weights have the dtype in which they are sent. Rank ``r`` has
        ``num_tokens_to_node[r][n]`` tokens that node ``n`` needs; all of its tokens if it is on that node.
        """
        memory, tickets = self._memory, list[Ticket]()
        for node in self._remote_nodes:
            tickets += self._receive_routing(collective, node, num_tokens_to_node, routing)
        for node in self._remote_nodes:
            tickets += self._send_routing(node, routing, forwarding.node_to_tokens[node])
        weights = routing.topk_weights
        row_bytes = routing_bytes_per_row(routing.num_topk, 0 if weights is None else weights.itemsize)
        num_sent = sum(forwarding.num_tokens_to_node[node] for node in self._remote_nodes)
        profile.internode_metadata_bytes += num_sent * row_bytes

        for node in self._remote_nodes:
            flag = self._layout.routing_flag(node)
            phase = f"routing of node {node}"
            wait_for_flag(
                memory.control, self._watchdog, flag, collective, phase, "its routing", node, self._transport.poll
            )
        if tickets:
            self._finish(tickets)
        return self.collect(num_tokens_to_node, routing)

    def _receive_routing(
        self, collective: int, node: int, num_tokens_to_node: Sequence[Sequence[int]], routing: Routing
    ) -> list[Ticket]:
        memory, src = self._memory, self._memory.control.counterpart(node)
        num_tokens, num_topk = num_tokens_to_node[src][memory.node], routing.num_topk

        def announce() -> None:
            memory.own.store(self._layout.routing_flag(node), collective)

        if not num_tokens * num_topk:
            announce()
            return []
        ids = memory.ids(memory.local, node, num_tokens, num_topk)
        if routing.topk_weights is None:
            return [self._transport.receive(ids, src, announce)]
        weights = memory.weights(memory.local, node, (num_tokens, num_topk), routing.topk_weights.dtype)
        return [self._transport.receive(ids, src), self._transport.receive(weights, src, announce)]

    def _send_routing(self, node: int, routing: Routing, tokens: torch.Tensor) -> list[Ticket]:
        if not len(tokens) * routing.num_topk:
            return []
        dst = self._memory.control.counterpart(node)
        messages = [routing.topk_idx.to(torch.int32)[tokens]]
        if routing.topk_weights is not None:
            messages.append(routing.topk_weights.detach()[tokens])
        return [self._transport.send(message, dst) for message in messages]

    def collect(
        self, num_tokens_to_node: Sequence[Sequence[int]], routing: Routing, attachments: Attachments | None = None
    ) -> NodeRouting:
        """Return the routing of every token that this node needs, which is here; arguments as in ``exchange``."""
        memory, num_topk = self._memory, routing.num_topk
        num_tokens = np.array([of_rank[memory.node] for of_rank in num_tokens_to_node], np.int64)
        src_to_ids, src_to_weights = (
            attachments.routing(num_tokens) if attachments else (memory.src_to_ids, memory.src_to_weights)
        )
        firsts = (0, *num_tokens.cumsum().tolist())
        # Both are copied out of shared memory: handles outlive the collective, and the next one overwrites the memory.
        ids = torch.empty(firsts[-1], num_topk, dtype=torch.int32, device="cpu")
        concatenate(src_to_ids, num_tokens * num_topk * ids.itemsize, ids)
        if routing.topk_weights is None:
            return NodeRouting(ids, None, firsts)
        weights = torch.empty(firsts[-1], num_topk, dtype=routing.topk_weights.dtype, device="cpu")
        concatenate(src_to_weights, num_tokens * num_topk * weights.itemsize, weights)
        return NodeRouting(ids, weights, firsts)

    def _finish(self, tickets: Sequence[Ticket]) -> None:
        counterparts = tuple(self._memory.control.counterpart(node) for node in self._remote_nodes)

        def num_sent() -> int:
            return sum(ticket.is_done for ticket in tickets)

        self._watchdog.wait_until(
            lambda: num_sent() == len(tickets),
            lambda: Stall("sending routing", counterparts, f"{len(tickets)} messages sent", f"{num_sent()}"),
        )


class Attachments:
    """Attachments of the ranks of all other nodes, in a dispatch of one shape.

    Attributes:
        attachment: that of this rank.
    """

    def __init__(
        self, memory: CpuMemory, routing: Routing, row_bytes: int, forwarding: NodeForwarding, profile: CallProfile
    ) -> None:
        """Attach this rank's routing and rows, which are in its shared memory."""
        self._memory, num_topk, weights = memory, routing.num_topk, routing.topk_weights
        self._ids_bytes, weight_bytes = 4 * num_topk, 0 if weights is None else weights.itemsize
        self._routing_bytes = routing_bytes_per_row(num_topk, weight_bytes)
        parts = [
            (memory.src_to_ids[memory.rank], self._ids_bytes),
            (memory.src_to_weights[memory.rank], num_topk * weight_bytes),
            (memory.pools[memory.local], row_bytes),
        ]
        table = np.array(parts, np.int64)
        tokens = list(forwarding.node_to_tokens)
        tokens[memory.node] = tokens[memory.node][:0]
        gathered, bounds = gather_parts(table, tokens)
        self.attachment = Attachment(gathered, bounds)
        num_sent = sum(map(len, tokens))
        profile.internode_metadata_bytes += num_sent * self._routing_bytes
        profile.internode_row_bytes += num_sent * row_bytes

    def routing(self, num_tokens: IntArray) -> tuple[IntArray, IntArray]:
        """Return the addresses of each rank's ids and weights; ``num_tokens`` of them are for this node."""
        memory = self._memory
        ids = np.where(memory.are_remote, memory.src_to_attachment, memory.src_to_ids)
        weights = np.where(
            memory.are_remote, memory.src_to_attachment + num_tokens * self._ids_bytes, memory.src_to_weights
        )
        return ids, weights

    def rows(self, num_tokens: IntArray) -> IntArray:
        """Return the addresses of the rows of each rank of another node."""
        return self._memory.src_to_attachment + num_tokens * self._routing_bytes
