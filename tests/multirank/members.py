"""The members of a communicator, numbered from 0: tests for all ranks of a group run on the ranks that are left."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import fusco
from fusco import ExpertPlacement


class Members:
    """A communicator in which rank ``i`` is the ``i``-th that is left; other attributes are those of the original."""

    def __init__(self, comm: fusco.Communicator, num_ranks: int) -> None:
        self._comm, self.num_ranks = comm, num_ranks

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)

    @property
    def rank(self) -> int:
        return self._comm.ranks.index(self._comm.rank)

    @property
    def placement(self) -> ExpertPlacement:
        return self._comm.placement.of_members(self._comm.ranks)

    def place(self, placement: ExpertPlacement) -> None:
        rows = {rank: placement.rank_to_experts[i] for i, rank in enumerate(self._comm.ranks)}
        num_places = len(placement.rank_to_experts[0])
        shares = placement.shares and {rank: placement.shares[i] for i, rank in enumerate(self._comm.ranks)}
        everyone = range(self.num_ranks)
        self._comm.place(
            ExpertPlacement.replicated(
                [rows.get(rank, [-1] * num_places) for rank in everyone],
                shares and [shares.get(rank, [0.0] * num_places) for rank in everyone],
                num_experts=placement.num_experts,
                may_lose=True,
            )
        )

    def all_to_all(self, output: Any, rows: Any, received: Any = None, sent: Any = None, **options: Any) -> Any:
        return self._comm.all_to_all(output, rows, self._for_all(received), self._for_all(sent), **options)

    def shuffle(self, send: Mapping[int, Any], receive: Mapping[int, Any]) -> None:
        numbers = self._comm.ranks
        self._comm.shuffle(*({numbers[rank]: each for rank, each in part.items()} for part in (send, receive)))

    def gather_send(self, segments: fusco.Segments, dst: int) -> None:
        self._comm.gather_send(segments, self._comm.ranks[dst])

    def scatter_recv(self, segments: fusco.Segments, src: int) -> None:
        self._comm.scatter_recv(segments, self._comm.ranks[src])

    def _for_all(self, splits: Sequence[int] | None) -> list[int] | None:
        if splits is None:
            return None
        by_number = dict(zip(self._comm.ranks, splits, strict=True))
        return [by_number.get(rank, 0) for rank in range(self.num_ranks)]
