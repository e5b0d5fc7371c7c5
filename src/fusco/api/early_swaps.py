"""Experts of a move that change places while others are under way, so that less is left to do at the end."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from fusco.api.move_task import RankTransfers
from fusco.api.placement_move import PlacementMove
from fusco.core.lanes import IntArray
from fusco.cpu.kernels.swap_memory import swap_memory

_SLICE_BYTES = 256 << 10  # swapped at once: 0.1 ms


class EarlySwaps:
    """New experts of a rank that are swapped, piece by piece, with the old ones in their places.

    Bytes are swapped once they have arrived and been passed on, and those in their place have been sent. The memory in
    which they arrived has the old ones then, and ``undo`` swaps again. Experts that this rank gets twice, and those in
    the place of one that moves within the rank, are left to the end.
    """

    def __init__(self, move: PlacementMove, transfers: RankTransfers) -> None:
        """Swap nothing yet."""
        self._move, self._transfers = move, transfers
        self._num_swapped: dict[int, IntArray] = {}  # bytes of each transfer, int64 (1,)

    def advance(self) -> Iterator[bool]:
        """Swap a slice for each True; yield False while nothing can be swapped."""
        sent_before = self._sent_before
        self._num_swapped = {i: np.zeros(1, np.int64) for i in sent_before}
        while True:
            moved = self._transfers.moved  # of complete steps, a new array after each
            for i, sent in sent_before.items():
                ready = min(int(moved[each]) for each in (i, *sent))
                for new, old in self._pieces(i, int(self._num_swapped[i][0]), ready):
                    for first in range(0, len(new), _SLICE_BYTES):
                        piece = slice(first, first + _SLICE_BYTES)
                        swap_memory(new[piece], old[piece], self._num_swapped[i])
                        yield True
            while moved is self._transfers.moved:
                yield False

    def undo(self) -> None:
        """Bring the old experts back to their places."""
        for i, num_bytes in self._num_swapped.items():
            for new, old in self._pieces(i, 0, int(num_bytes[0])):
                swap_memory(new, old, np.zeros(1, np.int64))
        self._num_swapped = {}

    def put(self) -> None:
        """Put all that is left into its places, once all ranks have everything; then nothing is to be undone."""
        experts, swapped = self._transfers.plan.experts, self._num_swapped
        self._num_swapped = {}
        self._move.put(self._transfers.arrived, {int(experts[i]): int(num[0]) for i, num in swapped.items()})

    @property
    def _sent_before(self) -> dict[int, list[int]]:
        """Transfers whose bytes may be swapped, and those that must have sent the same bytes before."""
        found = {}
        plan, old, new = self._transfers.plan, self._move.old[self._move.rank], self._move.new[self._move.rank]
        for i in self._transfers.arrived if self._move.is_in_place else ():
            places = np.flatnonzero(new == plan.experts[i])
            there = old[places[0]] if places[0] < len(old) else -1
            if len(places) == 1 and (there < 0 or there not in new):
                sent = (plan.src_ranks == self._move.rank) & ((plan.experts == there) | (plan.parents == i))
                found[i] = np.flatnonzero(sent).tolist()
        return found

    def _pieces(self, i: int, begin: int, end: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield bytes ``begin`` to ``end`` of a transfer: where they have arrived, and in their place."""
        expert, first = self._transfers.plan.experts[i], 0
        place = int(np.argmax(self._move.new[self._move.rank] == expert))
        for arrived in self._transfers.arrived[i]:
            piece = arrived[max(begin - first, 0) : max(end - first, 0)]
            for target in self._move.targets.pieces(place, max(begin, first), min(end, first + len(arrived))):
                yield piece[: len(target)], target
                piece = piece[len(target) :]
            first += len(arrived)
