"""The specification of dispatch and combine, in slow and simple code: each output, from the input of all ranks.

It shares no code with the planner or the engines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch


class Pair(NamedTuple):
    """Token ``token`` of rank ``src``, for its k-th expert."""

    src: int
    token: int
    k: int


@dataclass(frozen=True)
class Sums:
    """Expected output of combine on one rank, in float64 (num_tokens, hidden).

    Attributes:
        exact: the sums.
        size: the sums of the absolute values of all terms; rounding errors are measured against them.
        remote_size: the part of ``size`` that comes from other nodes.

    """

    exact: torch.Tensor
    size: torch.Tensor
    remote_size: torch.Tensor


class Law:
    """The specification applied to one routing of all ranks.

    Args:
        topk_idx: ``topk_idx[r]`` are the expert ids of rank ``r``, (num_tokens, num_topk).
        expert_to_rank: the rank that owns each expert.
        alignment: each expert's block is padded to a multiple of this.
        rows_per_expert: rows of each block, instead; rows beyond them are dropped. ``None`` means as many as needed.

    """

    def __init__(
        self,
        topk_idx: Sequence[torch.Tensor],
        expert_to_rank: Sequence[int],
        alignment: int = 1,
        rows_per_expert: int | None = None,
    ) -> None:
        self.topk_idx = [ids.tolist() for ids in topk_idx]
        self.expert_to_rank = tuple(expert_to_rank)
        self.ranks = range(len(topk_idx))
        self._num_topk = topk_idx[0].shape[1]
        self._alignment, self.rows_per_expert = alignment, rows_per_expert
        self._blocks: list[list[Pair]] = [[] for _ in expert_to_rank]
        for src in self.ranks:  # the order of these loops defines the order inside a block
            for token, experts in enumerate(self.topk_idx[src]):
                for k, expert in enumerate(experts):
                    if expert >= 0:
                        self._blocks[expert].append(Pair(src, token, k))

    def wanted(self, rank: int) -> list[list[Pair]]:
        """All rows for each expert of a rank, in order of expert."""
        return [block for block, owner in zip(self._blocks, self.expert_to_rank, strict=True) if owner == rank]

    def blocks(self, rank: int) -> list[list[Pair]]:
        """The block of each expert of a rank: its rows, but those that are dropped."""
        return [block[: self.rows_per_expert] for block in self.wanted(rank)]

    def num_dropped(self, rank: int) -> list[int]:
        """Rows of each expert of a rank that are dropped."""
        return [len(all_) - len(block) for all_, block in zip(self.wanted(rank), self.blocks(rank), strict=True)]

    def slots(self, rank: int) -> list[Pair | None]:
        """The token and expert of each expert-major row of a rank; ``None`` is padding."""
        slots: list[Pair | None] = []
        for block in self.blocks(rank):
            slots += block
            num_rows = self.rows_per_expert or -(-len(block) // self._alignment) * self._alignment
            slots += [None] * (num_rows - len(block))
        return slots

    def undefined(self, rank: int) -> torch.Tensor:
        """True for each row of a rank that may be anything: behind a block of fixed size, and its padding."""
        is_undefined = torch.zeros(len(self.slots(rank)), dtype=torch.bool)
        for expert, count in enumerate(self.counts(rank)):
            if self.rows_per_expert is not None:
                padded = -(-count // self._alignment) * self._alignment
                is_undefined[expert * self.rows_per_expert + padded : (expert + 1) * self.rows_per_expert] = True
        return is_undefined

    def counts(self, rank: int) -> list[int]:
        """Rows of each block."""
        return list(map(len, self.blocks(rank)))

    def rows(self, rank: int, x: Sequence[torch.Tensor]) -> torch.Tensor:
        """Expert-major rows of a rank, from the token-major rows of all ranks."""
        slots = self.slots(rank)
        rows = torch.zeros(len(slots), *x[0].shape[1:], dtype=x[0].dtype)
        for slot, pair in enumerate(slots):
            if pair:
                rows[slot] = x[pair.src][pair.token]
        return rows

    def row_weights(self, rank: int, weights: Sequence[torch.Tensor]) -> torch.Tensor:
        """The weight of each expert-major row of a rank; padding has zero."""
        slots = self.slots(rank)
        return torch.tensor([weights[p.src][p.token, p.k] if p else 0.0 for p in slots], dtype=weights[0].dtype)

    def sums(
        self, rank: int, y: Sequence[torch.Tensor], weights: Sequence[torch.Tensor] | None, rank_to_node: Sequence[int]
    ) -> Sums:
        """Expected output of combine on a rank, from the expert-major rows of all ranks."""
        shape = (len(self.topk_idx[rank]), y[0].shape[1])
        exact, size, remote_size = (torch.zeros(shape, dtype=torch.float64) for _ in range(3))
        for owner in self.ranks:
            mine = [(slot, p.token, p.k) for slot, p in enumerate(self.slots(owner)) if p and p.src == rank]
            slot, token, k = torch.tensor(mine, dtype=torch.int64).view(-1, 3).unbind(1)
            terms = y[owner][slot].double()
            if weights is not None:
                terms = terms * weights[rank][token, k].double()[:, None]
            exact.index_add_(0, token, terms)
            size.index_add_(0, token, terms.abs())
            if rank_to_node[owner] != rank_to_node[rank]:
                remote_size.index_add_(0, token, terms.abs())
        return Sums(exact, size, remote_size)

    def nodes_of(self, src: int, token: int, rank_to_node: Sequence[int]) -> set[int]:
        """The nodes that have an expert of a token."""
        return {rank_to_node[self.expert_to_rank[expert]] for expert in self.topk_idx[src][token] if expert >= 0}

    def num_internode_rows(self, rank_to_node: Sequence[int]) -> int:
        """Number of distinct (token, remote node) pairs: the rows that must be sent between nodes."""
        return sum(
            len(self.nodes_of(src, token, rank_to_node) - {rank_to_node[src]})
            for src in self.ranks
            for token in range(len(self.topk_idx[src]))
        )

    def error_bound(
        self, sums: Sums, dtype: torch.dtype, wire_dtype: torch.dtype | None, num_hops: int = 1
    ) -> torch.Tensor:
        """Largest permitted difference of combine from the exact sums.

        All terms are weighted and added in float32 (float64 for float64 rows): at most one rounding for each product
        and one for each of fewer than ``num_topk`` + 2 * world size additions. Partial sums of another node are
        rounded once more for each hop, to the dtype of the rows or, if it is wider, the wire dtype. The result is
        rounded to the dtype of the rows.
        """
        wire_dtype = torch.promote_types(dtype, wire_dtype or dtype)
        accumulation = torch.float64 if dtype == torch.float64 else torch.float32
        num_roundings = self._num_topk + 2 * len(self.ranks) + 1
        if accumulation == torch.float64:
            num_roundings *= 2  # the exact sums are in float64, too
        bound = num_roundings * _half_ulp(accumulation, sums.size)
        for _ in range(num_hops if wire_dtype != accumulation else 0):
            # Each of at most num_topk partial sums may fall below the smallest normal value.
            bound = bound + _half_ulp(wire_dtype, sums.remote_size + bound) + self._num_topk * _least(wire_dtype)
        if dtype != accumulation:
            bound = bound + _half_ulp(dtype, sums.exact.abs() + bound) + _least(dtype)
        return bound


def _half_ulp(dtype: torch.dtype, size: torch.Tensor) -> torch.Tensor:
    return size * (torch.finfo(dtype).eps / 2)


def _least(dtype: torch.dtype) -> float:
    """Half the distance between subnormal values."""
    info = torch.finfo(dtype)
    return info.smallest_normal * info.eps / 2
