"""Transfers between ranks: tables of pieces of messages."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from fusco.core.lanes import IntArray


@dataclass(frozen=True, eq=False, kw_only=True)
class Transfers:
    """Pieces of messages, int64 (num_transfers,) each, in the order in which both ends lay them out.

    A message is what ``src_rank`` has for ``dst_rank``. Its bytes ``first_byte`` to ``first_byte + num_bytes`` go from
    ``from_rank`` to ``to_rank`` in stage ``stage`` (-1 for none). Pieces with the same two ends and the same stage form
    one flow, in order.
    """

    from_rank: IntArray
    to_rank: IntArray
    src_rank: IntArray
    dst_rank: IntArray
    first_byte: IntArray
    num_bytes: IntArray
    stage: IntArray

    def __len__(self) -> int:
        return len(self.num_bytes)

    def select(self, chosen: npt.NDArray[np.bool_] | IntArray) -> Transfers:
        """Select transfers by a mask or by indices, in their order."""
        return Transfers(**{field.name: getattr(self, field.name)[chosen] for field in fields(self)})

    def sent_by(self, rank: int) -> Transfers:
        """Select the transfers that a rank sends."""
        return self.select(self.from_rank == rank)

    def received_by(self, rank: int) -> Transfers:
        """Select the transfers that a rank receives."""
        return self.select(self.to_rank == rank)

    def load(self, num_ranks: int) -> IntArray:
        """Return the bytes that each rank sends to and receives from other ranks: int64 (2, num_ranks)."""
        loads = np.zeros((2, num_ranks), np.int64)
        moves = self.from_rank != self.to_rank
        np.add.at(loads[0], self.from_rank[moves], self.num_bytes[moves])
        np.add.at(loads[1], self.to_rank[moves], self.num_bytes[moves])
        return loads
