"""Messages of routing between nodes: one to each counterpart, with the routing of tokens for its node."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from fusco.core.rows import aligned, row_bytes
from fusco.cuda.kernels.gather_rows import gather_rows
from fusco.cuda.kernels.launcher import Launcher
from fusco.cuda.nccl import Message
from fusco.cuda.network import messages_of
from fusco.planner.forwarding import DeviceForwarding
from fusco.planner.internode import InternodeTraffic
from fusco.planner.routing import Routing

_ALIGNMENT = 16


class RoutingMessages:
    """Routing sent to and received from the counterparts of a rank. Must live until all messages have been sent."""

    def __init__(self, routing: Routing, forwarding: DeviceForwarding, traffic: InternodeTraffic) -> None:
        """Allocate the messages."""
        topology, rank = traffic.groups.topology, traffic.rank
        self._num_topk = routing.num_topk
        self._ids = aligned(routing.topk_idx.int())
        self._weights = None if routing.topk_weights is None else aligned(routing.topk_weights)
        # Ids are last, as they are no wider than weights: so both are aligned without a gap.
        self._packed = [self._ids] if self._weights is None else [self._weights, self._ids]
        self._sizes = list(map(row_bytes, self._packed))
        remotes, local = topology.remote_nodes(rank), topology.rank_to_local[rank]
        self._peers = [topology.node_to_ranks[remote][local] for remote in remotes]
        self._tokens = [forwarding.node_to_tokens[remote, : traffic.num_rows[rank][remote]] for remote in remotes]
        self._num_incoming = [traffic.num_rows[peer][traffic.node] for peer in self._peers]
        row_size, device = sum(self._sizes), self._ids.device
        self._outgoing = _room_for([len(of_node) * row_size for of_node in self._tokens], device)
        self._incoming = _room_for([num_rows * row_size for num_rows in self._num_incoming], device)

    def pack(self, launcher: Launcher) -> None:
        """Fill the outgoing messages."""
        for values, end in zip(self._packed, itertools.accumulate(self._sizes), strict=True):
            first = end - row_bytes(values)
            parts = [
                (of_node, message[len(of_node) * first :])
                for of_node, message in zip(self._tokens, self._outgoing, strict=True)
            ]
            gather_rows(launcher, values, parts)

    @property
    def sends(self) -> list[Message]:
        """The outgoing messages."""
        return messages_of(zip(self._peers, self._outgoing, strict=True))

    @property
    def receives(self) -> list[Message]:
        """The incoming messages."""
        return messages_of(zip(self._peers, self._incoming, strict=True))

    @property
    def published(self) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        """Ids and weights of this rank's tokens, then the received ones."""
        known = [(self._ids, self._weights)]
        for num_rows, message in zip(self._num_incoming, self._incoming, strict=True):
            shape = (num_rows, self._num_topk)
            ids = message[num_rows * (sum(self._sizes) - self._sizes[-1]) :].view(self._ids.dtype).view(shape)
            weights = None
            if self._weights is not None:
                weights = message[: num_rows * self._sizes[0]].view(self._weights.dtype).view(shape)
            known.append((ids, weights))
        return known


def _room_for(sizes: Sequence[int], device: torch.device) -> list[torch.Tensor]:
    """Return bytes for some messages, each aligned, in one allocation."""
    padded = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes]
    memory = torch.empty(sum(padded), dtype=torch.uint8, device=device)
    return [part[:size] for part, size in zip(memory.split_with_sizes(padded), sizes, strict=True)]
