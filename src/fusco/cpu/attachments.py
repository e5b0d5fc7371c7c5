"""Attachments of records: routing and rows of a small dispatch, which go to other nodes with the counts.

Then a dispatch waits once, as within a node: where a rank's record is, its routing and its rows are, too. An attachment
has the rank's tokens for a node: their expert ids, their weights, their rows. It goes to the counterpart, so nothing
can balance what the ranks send; it is for few bytes.
"""

from __future__ import annotations

import numpy as np

from fusco.control.record_round import Attachment
from fusco.core.lanes import IntArray
from fusco.core.profile import CallProfile
from fusco.cpu.kernels.gather_rows import gather_parts
from fusco.cpu.memory import CpuMemory
from fusco.planner.forwarding import NodeForwarding
from fusco.planner.routing import Routing, routing_bytes_per_row


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
