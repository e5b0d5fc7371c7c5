"""Numbers of rows that every rank of a dispatch publishes, as counts of its record."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple


class PublishedRows(NamedTuple):
    """Numbers of rows that a rank dispatches, as other ranks need them."""

    num_tokens: int  # of the rank
    # tokens for each other node; empty if there is one node, or with an earlier plan
    num_rows_to_node: tuple[int, ...] = ()

    def pack(self) -> tuple[int, ...]:
        """Return the counts of a record."""
        return (self.num_tokens, *self.num_rows_to_node)

    @staticmethod
    @lru_cache(maxsize=1024)
    def unpack(counts: tuple[int, ...]) -> PublishedRows:
        """Return the inverse of ``pack``."""
        return PublishedRows(counts[0], counts[1:])
