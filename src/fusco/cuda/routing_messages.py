"""Messages of routing between nodes: one to each counterpart, with the routing of tokens for its node."""

from __future__ import annotations

import torch

from fusco.cuda.network import messages_of
from fusco.planner.internode import InternodeTraffic
from fusco.planner.routing import Routing

_ALIGNMENT = 16


class RoutingMessages:
    """Routing sent to and received from the counterparts of a rank. Must live until all messages have been sent."""

    def __init__(self, routing: Routing, packed: torch.Tensor, traffic: InternodeTraffic) -> None:
        """``packed`` is from ``plan_forwarding``."""
        topology, rank, weights = traffic.groups.topology, traffic.rank, routing.topk_weights
        self._routing, self._packed = routing, packed
        remotes, local = topology.remote_nodes(rank), topology.rank_to_local[rank]
        peers = [topology.node_to_ranks[remote][local] for remote in remotes]
        # Ids are int32 and last, as they are no wider than weights: so both are aligned without a gap.
        self._weight_bytes = 0 if weights is None else routing.num_topk * weights.element_size()
        row_bytes = self._weight_bytes + routing.num_topk * 4
        self._num_incoming = [traffic.num_rows[peer][traffic.node] for peer in peers]
        most = max(1, -(-max(self._num_incoming) * row_bytes // _ALIGNMENT)) * _ALIGNMENT
        self._incoming = packed.new_empty(len(peers), most)
        outgoing = [traffic.num_rows[rank][remote] * row_bytes for remote in remotes]
        incoming = [num_rows * row_bytes for num_rows in self._num_incoming]
        self.sends = messages_of((peer, packed[i, : outgoing[i]]) for i, peer in enumerate(peers))
        self.receives = messages_of((peer, self._incoming[i, : incoming[i]]) for i, peer in enumerate(peers))

    @property
    def published(self) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        """Ids and weights of this rank's tokens, then the received ones."""
        own = self._routing
        known = [(own.topk_idx, own.topk_weights)]
        for num_rows, message in zip(self._num_incoming, self._incoming, strict=True):
            end = num_rows * self._weight_bytes
            ids = message[end : end + num_rows * own.num_topk * 4].view(torch.int32).view(num_rows, own.num_topk)
            weights = None
            if own.topk_weights is not None:
                weights = message[:end].view(own.topk_weights.dtype).view(num_rows, own.num_topk)
            known.append((ids, weights))
        return known
