"""Messages of routing between nodes: one to each counterpart, with the routing of tokens for its node."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fusco.cuda.between_nodes.nccl import Message
from fusco.cuda.kernels.abi import Memory, MemoryAt
from fusco.planner.internode import InternodeTraffic
from fusco.planner.routing import Routing

_ALIGNMENT = 16


class RoutingMessages:
    """Routing sent to and received from the counterparts of a rank. Must live until all messages have been sent."""

    def __init__(
        self, routing: Routing, packed: torch.Tensor, traffic: InternodeTraffic, kept: torch.Tensor | None = None
    ) -> None:
        """Prepare the messages of this rank's routing, ``packed`` by ``plan_forwarding``.

        ``kept`` is memory of the caller for what is sent, instead of ``packed``, and for what is received.
        """
        topology, rank, weights = traffic.lanes.topology, traffic.rank, routing.topk_weights
        self._routing = routing
        self._packed = packed if kept is None else _first(kept[0], *packed.shape)
        remotes, local = topology.remote_nodes(rank), topology.rank_to_local[rank]
        peers = [topology.node_to_ranks[remote][local] for remote in remotes]
        # Ids are int32 and last, as they are no wider than weights: so both are aligned without a gap.
        self._weight_bytes = 0 if weights is None else routing.num_topk * weights.element_size()
        row_bytes = self._weight_bytes + routing.num_topk * 4
        self._num_incoming = [traffic.num_rows[peer][traffic.node] for peer in peers]
        most = max(1, -(-max(self._num_incoming) * row_bytes // _ALIGNMENT)) * _ALIGNMENT
        self._incoming = packed.new_empty(len(peers), most) if kept is None else _first(kept[1], len(peers), most)
        outgoing = [traffic.num_rows[rank][remote] * row_bytes for remote in remotes]
        incoming = [num_rows * row_bytes for num_rows in self._num_incoming]
        self.sends = _messages(peers, self._packed, outgoing)
        self.receives = _messages(peers, self._incoming, incoming)

    @property
    def memory(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The routing that is sent, and memory for what is received."""
        return self._packed, self._incoming

    @property
    def published(self) -> list[tuple[Memory, Memory | None]]:
        """Ids and weights of this rank's tokens, then the received ones."""
        own = self._routing
        known: list[tuple[Memory, Memory | None]] = [(own.topk_idx, own.topk_weights)]
        for i, num_rows in enumerate(self._num_incoming):
            at = self._incoming.data_ptr() + i * self._incoming.shape[1]
            weights = None if own.topk_weights is None else MemoryAt(at, own.topk_weights.element_size())
            known.append((MemoryAt(at + num_rows * self._weight_bytes, 4), weights))
        return known


def _first(memory: torch.Tensor, num_messages: int, num_bytes: int) -> torch.Tensor:
    return memory[: num_messages * num_bytes].view(num_messages, num_bytes)


def _messages(peers: Sequence[int], memory: torch.Tensor, sizes: Sequence[int]) -> list[Message]:
    """Return the messages in the rows of ``memory`` to or from each peer, except for empty ones."""
    places = range(memory.data_ptr(), memory.data_ptr() + memory.nbytes, memory.shape[1])
    return [Message(peer, place, size) for peer, place, size in zip(peers, places, sizes, strict=True) if size]
