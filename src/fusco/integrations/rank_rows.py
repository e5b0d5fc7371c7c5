"""Tokens sent once to each rank: rows by source rank, then token, as DeepEP's normal mode lays them out.

To a communicator, every rank is one expert. The routing travels with the rows, as a payload of int32 words.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from fusco.api.communicator import Communicator
from fusco.api.handle import Dispatched, Handle
from fusco.core.config import Launch, StaticRows
from fusco.integrations.growth import GrowingCommunicator, Need
from fusco.integrations.routing_maps import indices_to_map

_MAX_RANKS_OF_A_TOKEN = 32  # a warp's lanes


@dataclass(frozen=True)
class RankRouting:
    """A routing that was dispatched, with what came of other ranks' routing."""

    comm: Communicator  # the communicator that owns ``handle``
    handle: Handle  # of its dispatch
    rank: int  # this rank
    words: torch.Tensor  # int32 (num_rows, 1 + 2 x num_topk): source rank, ids of experts, bits of float32 weights
    # of this rank's tokens, int64 (num_tokens, num_topk), or ``None`` if only ranks were given
    topk_idx: torch.Tensor | None
    num_experts: int  # of all ranks together
    num_rows: torch.Tensor  # rows that arrived, int64 (1,); fewer than those of ``words`` if these are static

    @property
    def is_row(self) -> torch.Tensor:
        """True for rows that arrived: bool (num_rows,)."""
        return torch.arange(len(self.words), device=self.words.device) < self.num_rows

    def sources(self) -> torch.Tensor:
        """Return the source rank of each row, int64; -1 behind the last."""
        return torch.where(self.is_row, self.words[:, 0].long(), -1)

    def local_idx(self) -> torch.Tensor:
        """Return local experts of each row, int64 (num_rows, num_topk); -1 for those of other ranks."""
        num_topk = self.words.shape[1] // 2
        num_local = self.num_experts // self.comm.topology.world_size
        local = self.words[:, 1 : 1 + num_topk].long() - self.rank * num_local
        return torch.where((local >= 0) & (local < num_local) & self.is_row[:, None], local, -1)

    def weights(self) -> torch.Tensor:
        """Return the weights of each row, float32 (num_rows, num_topk), of any rank's experts."""
        return self.words[:, 1 + self.words.shape[1] // 2 :].contiguous().view(torch.float32)

    def local_routing(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return local experts and weights of each row: bool and float32 (num_rows, num_local_experts)."""
        num_local, idx = self.num_experts // self.comm.topology.world_size, self.local_idx()
        return indices_to_map(idx, self.weights(), len(idx), num_local)


class RankRows:
    """Dispatch and combine of rank-major rows, on a communicator that grows."""

    def __init__(self, group: dist.ProcessGroup, ranks_per_node: int | None = None) -> None:
        self._rank, self._num_ranks = dist.get_rank(group), dist.get_world_size(group)
        self.comms = GrowingCommunicator(group, self._num_ranks, ranks_per_node=ranks_per_node)

    def dispatch(
        self,
        payloads: Sequence[torch.Tensor],
        is_token_in_rank: torch.Tensor,
        routing: tuple[torch.Tensor | None, torch.Tensor | None, int],
        *,
        num_static_rows: int = 0,
        launch: Launch | None = None,
    ) -> tuple[tuple[torch.Tensor, ...], RankRouting]:
        """Send payloads (num_tokens, ...) to ranks, bool (num_tokens, num_ranks); return their rows, and the routing.

        ``routing`` is int64 ``topk_idx`` and float32 ``topk_weights`` (num_tokens, num_topk), or ``None``, and the
        number of experts of all ranks together. ``num_static_rows`` is a fixed number of rows, or 0.
        """
        topk_idx, topk_weights, num_experts = routing
        with self.comms.rejecting():
            words = self._words(payloads[0], topk_idx, topk_weights)
            sent = [*(payload.contiguous() for payload in payloads), words]
            ranks = torch.arange(self._num_ranks, device=words.device)
            ranks_of_tokens = torch.where(is_token_in_rank, ranks, -1)
            if self._num_ranks > _MAX_RANKS_OF_A_TOKEN:
                ranks_of_tokens = ranks_of_tokens.topk(_MAX_RANKS_OF_A_TOKEN, dim=1).values
            static = StaticRows(num_static_rows) if num_static_rows else None
            need = Need.of(sent, ranks_of_tokens.shape[1])

        def dispatch(comm: Communicator, _: Need) -> tuple[Communicator, Dispatched]:
            return comm, comm.dispatch(sent, ranks_of_tokens, static=static, launch=launch)

        comm, arrived = self.comms.run(need, words.device, dispatch)
        rank_routing = RankRouting(
            comm, arrived.handle, self._rank, arrived.payloads[-1], topk_idx, num_experts, arrived.num_rows_per_expert
        )
        return arrived.payloads[:-1], rank_routing

    def abort(self) -> None:
        """Release all resources without waiting for other ranks."""
        self.comms.abort()

    def _words(
        self, like: torch.Tensor, topk_idx: torch.Tensor | None, topk_weights: torch.Tensor | None
    ) -> torch.Tensor:
        source = torch.full((len(like), 1), self._rank, dtype=torch.int32, device=like.device)
        if topk_idx is None:
            return source
        weights = topk_idx.new_zeros(topk_idx.shape, dtype=torch.float32) if topk_weights is None else topk_weights
        return torch.cat([source, topk_idx.int(), weights.float().contiguous().view(torch.int32)], 1)


def dispatch_again(
    payloads: Sequence[torch.Tensor], routing: RankRouting, launch: Launch | None = None
) -> tuple[torch.Tensor, ...]:
    """Send other rows along a routing."""
    with routing.comm.rejecting():
        rows = [each.contiguous() for each in payloads]
    return routing.comm.dispatch_again(rows, routing.handle, launch=launch)


def combine(
    parts: Sequence[torch.Tensor], routing: RankRouting, launch: Launch | None = None
) -> tuple[torch.Tensor, ...]:
    """Add up the rows of each token, one from each rank, in each of several tensors: (num_tokens, hidden)."""
    with routing.comm.rejecting():
        rows = [part.contiguous() for part in parts]
    return routing.comm.combine_all(rows, routing.handle, launch=launch)


def combine_dense(
    rows: torch.Tensor, local_values: torch.Tensor, routing: RankRouting, launch: Launch | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add up the rows of each token, and values of rows and local experts (num_rows, num_local_experts).

    Returns (num_tokens, hidden), and float32 (num_tokens, num_experts). Values of experts that a row was not sent for
    are ignored.
    """
    with routing.comm.rejecting():
        if routing.topk_idx is None:
            raise ValueError("values of experts can be combined only if the dispatch had topk_idx")
        idx = routing.local_idx()
        values = local_values.float().gather(1, idx.clamp(min=0)) * (idx >= 0)
    sums, of_tokens = combine((rows, values), routing, launch)
    places = torch.where(routing.topk_idx < 0, routing.num_experts, routing.topk_idx)
    dense = of_tokens.new_zeros(len(of_tokens), routing.num_experts + 1)
    return sums, dense.scatter_(1, places, of_tokens)[:, :-1]


def ranks_of(topk_idx: torch.Tensor, num_experts: int, num_ranks: int) -> torch.Tensor:
    """Return which ranks a token is sent to: bool (num_tokens, num_ranks)."""
    ranks = torch.where(topk_idx < 0, num_ranks, topk_idx // (num_experts // num_ranks))
    is_in = torch.zeros(len(topk_idx), num_ranks + 1, dtype=torch.bool, device=topk_idx.device)
    return is_in.scatter_(1, ranks, value=True)[:, :-1]


def checked_handle(routing: Any) -> RankRouting:
    """Return a caller's handle as a routing; raises ``TypeError`` for another one."""
    if not isinstance(routing, RankRouting):
        raise TypeError(f"this call needs the handle of a dispatch, got {type(routing).__name__}")
    return routing
