"""Tokens sent once to each rank: rows by source rank, then token, as DeepEP's normal mode lays them out.

To a communicator, every rank is one expert. The routing travels with the rows, as a payload of int32 words.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from fusco.api.communicator import Communicator
from fusco.core.checked_ids import num_topk_of, require_ranks_of
from fusco.core.config import Launch, StaticRows
from fusco.core.current_stream import is_capturing
from fusco.integrations.along_handles import KeptTensors, SentHandle, require_shape
from fusco.integrations.group_communicators import GroupCommunicators
from fusco.integrations.routing_maps import scattered

_MAX_RANKS_OF_A_TOKEN = 32  # a warp's lanes
NUM_SOURCE_WORDS = 2  # source rank, and its token


@dataclass(frozen=True, eq=False, kw_only=True)
class RankRouting(SentHandle):
    """A routing that was dispatched, with what came of other ranks' routing."""

    rank: int  # this rank
    # int32 (num_rows, 2 + 2 x num_topk): source rank and token, ids of experts, bits of float32 weights
    words: torch.Tensor
    num_rows: torch.Tensor | None  # rows that arrived, int64 (1,), if those of ``words`` are static; else ``None``

    @property
    def num_local_experts(self) -> int:
        """Number of experts of each rank."""
        return self.num_experts // self.comm.placement.world_size

    @property
    def is_row(self) -> torch.Tensor | None:
        """True for rows that arrived: bool (num_rows, 1); ``None`` if all did."""
        if self.num_rows is None:
            return None
        return torch.arange(len(self.words), device=self.words.device)[:, None] < self.num_rows

    def local_idx(self, first: int = 0, of_others: int = -1) -> torch.Tensor:
        """Return local experts of each row, counted from ``first``, int64 (num_rows, num_topk), or ``of_others``."""
        num_local = self.num_local_experts
        idx = self.words[:, NUM_SOURCE_WORDS : (NUM_SOURCE_WORDS + self.words.shape[1]) // 2].long()
        is_other = idx.div(num_local, rounding_mode="floor") != self.rank
        if (is_row := self.is_row) is not None:
            is_other |= ~is_row
        # Not ``torch.where``, which on CUDA launches a kernel to fill a tensor with the number.
        return idx.add_(first - self.rank * num_local).masked_fill_(is_other, of_others)

    def weights(self) -> torch.Tensor:
        """Return the weights of each row, float32 (num_rows, num_topk), of any rank's experts; a view."""
        return self.words.view(torch.float32)[:, (NUM_SOURCE_WORDS + self.words.shape[1]) // 2 :]

    def local_idx_and_weights(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return local experts of each row, int64 (num_rows, num_topk), -1 for others, and weights, 0 for others."""
        idx = self.local_idx()
        return idx, self.weights().clone(memory_format=torch.contiguous_format).masked_fill_(idx < 0, 0)

    def rows_from_ranks(self) -> torch.Tensor:
        """Return the rows that came from each rank, int64 (num_ranks,)."""
        is_from = self.words[:, :1] == torch.arange(self.comm.placement.world_size, device=self.words.device)
        if (is_row := self.is_row) is not None:
            is_from &= is_row
        return is_from.sum(0)

    def _keep(self, name: str, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        return self.kept.get(name, self.words.device, make)

    @property
    def places(self) -> torch.Tensor:
        """Columns of ``scattered`` for local experts of rows: int64 (num_rows, num_topk), kept."""
        return self._keep("places", lambda: self.local_idx(first=1, of_others=0))

    def by_local_expert(self, weights: torch.Tensor) -> torch.Tensor:
        """Return weights of rows and experts of their tokens by local expert: float32 (num_rows, num_local_experts)."""
        return scattered(self.places, weights, self.num_local_experts)

    def local_map(self) -> torch.Tensor:
        """Return which local experts a row is for: bool (num_rows, num_local_experts)."""
        routing = self.places.new_zeros(len(self.words), self.num_local_experts + 1, dtype=torch.bool)
        return routing.scatter_(1, self.places, value=True)[:, 1:]

    def values_of_pairs(self, local_values: torch.Tensor) -> torch.Tensor:
        """Gather each row's value (num_rows, num_local_experts) for its token's experts; 0 elsewhere."""
        columns = self._keep("columns of rows", lambda: (self.places - 1).clamp_(min=0))
        is_other = self._keep("is other", lambda: self.places == 0)
        return local_values.gather(1, columns).masked_fill_(is_other, 0)


class RankRows:
    """Dispatch of rank-major rows, on a communicator that grows."""

    def __init__(self, group: dist.ProcessGroup, comms: GroupCommunicators) -> None:
        self._rank, self._num_ranks = dist.get_rank(group), dist.get_world_size(group)
        self._kept = KeptTensors()
        self._comms = comms
        self._checked: tuple[str, int] | None = None  # the latest purpose

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
        with self._comms.rejecting():
            require_shape("is_token_in_rank", is_token_in_rank, len(payloads[0]), self._num_ranks)
            if is_token_in_rank.dtype != torch.bool:
                raise TypeError(f"is_token_in_rank must be bool, got {is_token_in_rank.dtype}")
            purpose = "dispatch", num_experts
            if topk_idx is None:
                purpose = f"dispatch{' into fixed rows' * bool(num_static_rows)} without topk_idx", num_experts
            else:
                num_topk_of(topk_idx, len(payloads[0]))
                # On CUDA the host would wait for the device in each call.
                if topk_idx.device.type == "cpu" or (purpose != self._checked and not is_capturing()):
                    require_ranks_of(topk_idx, is_token_in_rank, num_experts)
            words = self._words(payloads[0], topk_idx, topk_weights)
            sent = [*(payload.contiguous() for payload in payloads), words]
            ranks_of_tokens = self._ranks_of_tokens(is_token_in_rank)
            if self._num_ranks > _MAX_RANKS_OF_A_TOKEN:
                ranks_of_tokens = ranks_of_tokens.topk(_MAX_RANKS_OF_A_TOKEN, dim=1).values
            static = StaticRows(num_static_rows) if num_static_rows else None
            need = self._comms.need_of(sent, ranks_of_tokens.shape[1])

        def dispatch(comm: Communicator) -> tuple[tuple[torch.Tensor, ...], RankRouting]:
            arrived = comm.dispatch(sent, ranks_of_tokens, static=static, launch=launch)
            *rows, words = arrived.payloads
            return tuple(rows), RankRouting(
                comms=self._comms,
                comm=comm,
                capacity=comm.capacity,
                topology=comm.topology,
                handle=arrived.handle,
                topk_idx=topk_idx,
                num_topk=0 if topk_idx is None else topk_idx.shape[1],
                num_experts=num_experts,
                rank=self._rank,
                words=words,
                num_rows=arrived.num_rows_per_expert if static else None,
            )

        arrived = self._comms.run(purpose, self._num_ranks, need, words.device, dispatch)
        self._checked = purpose
        return arrived

    def prefix_matrix(self, routing: RankRouting) -> torch.Tensor:
        """Return int32 (num_ranks, num_ranks): cumulated rows of source ranks in this rank's column, else zero."""
        matrix = routing.words.new_zeros(self._num_ranks, self._num_ranks)
        matrix[:, self._rank] = routing.rows_from_ranks().cumsum(0)
        return matrix

    def source_words(self, num_tokens: int, device: torch.device) -> torch.Tensor:
        """Return this rank and the number of each token, int32 (num_tokens, 2); a view of what is kept."""
        size = 1 << max(num_tokens - 1, 0).bit_length()

        def make() -> torch.Tensor:
            tokens = torch.arange(size, dtype=torch.int32, device=device)
            return torch.stack((torch.full_like(tokens, self._rank), tokens), 1)

        return self._kept.get(f"{size} sources on {device}", device, make)[:num_tokens]

    def _ranks_of_tokens(self, is_token_in_rank: torch.Tensor) -> torch.Tensor:
        """Return ranks, int64 (num_tokens, num_ranks); -1 for those that a token is not sent to."""
        device = is_token_in_rank.device
        none = self._kept.get(f"none on {device}", device, lambda: torch.full((), -1, device=device))
        ranks = self._kept.get(f"ranks on {device}", device, lambda: torch.arange(self._num_ranks, device=device))
        return torch.where(is_token_in_rank, ranks, none)

    def _words(
        self, like: torch.Tensor, topk_idx: torch.Tensor | None, topk_weights: torch.Tensor | None
    ) -> torch.Tensor:
        source = self.source_words(len(like), like.device)
        if topk_idx is None:
            if topk_weights is not None:
                raise ValueError("topk_weights need topk_idx, the experts that they are of")
            return source
        require_shape("topk_weights", topk_weights, *topk_idx.shape)
        weights = topk_idx.new_zeros(topk_idx.shape, dtype=torch.float32) if topk_weights is None else topk_weights
        return torch.cat([source, topk_idx.int(), weights.float().contiguous().view(torch.int32)], 1)


def count_of_each(idx: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Return how often each expert occurs, int32 (num_experts,); the host does not wait, as in ``torch.bincount``."""
    places = (idx + 1).clamp_(0, num_experts + 1).flatten()
    counts = idx.new_zeros(num_experts + 2, dtype=torch.int32)
    return counts.scatter_add_(0, places, torch.ones_like(places, dtype=torch.int32))[1:-1]


def ranks_of(topk_idx: torch.Tensor, num_experts: int, num_ranks: int) -> torch.Tensor:
    """Return which ranks a token is sent to: bool (num_tokens, num_ranks)."""
    # The first column is for no expert, the last for ids that are none.
    places = topk_idx.div(num_experts // num_ranks, rounding_mode="floor").add_(1).clamp_(0, num_ranks + 1)
    is_in = topk_idx.new_zeros(len(topk_idx), num_ranks + 2, dtype=torch.bool)
    return is_in.scatter_(1, places, value=True)[:, 1:-1]
