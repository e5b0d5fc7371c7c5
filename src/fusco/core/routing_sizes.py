"""Sizes of a routing, and the rows that the busiest rank or expert gets of it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fusco.core.integers import check_integer


@dataclass(frozen=True, kw_only=True)
class RoutingSizes:
    """Sizes of a routing, from which ``StaticRows`` are chosen. The experts of a token are assumed to differ.

    Attributes:
        max_tokens_per_rank: T, the maximum number of tokens of a rank.
        world_size: R, the number of ranks.
        num_topk: K, experts per token.
        num_experts: E, experts of all ranks together, the same number on each; of a placement with copies, its places.

    Raises:
        TypeError, ValueError: for a value of another type, or out of range.
    """

    max_tokens_per_rank: int
    world_size: int
    num_topk: int
    num_experts: int

    def __post_init__(self) -> None:
        for name in ("max_tokens_per_rank", "world_size", "num_topk", "num_experts"):
            check_integer(name, getattr(self, name), least=1)
        if self.num_experts % self.world_size:
            raise ValueError(
                f"{self.num_experts} experts are not the same number on each of {self.world_size} ranks: pass the "
                f"largest number of a rank times the ranks"
            )

    @property
    def _num_tokens(self) -> int:
        return self.world_size * self.max_tokens_per_rank

    def rows_of_rank(self, skew: float | None, expert_alignment: int) -> int:
        """Return the rows of a busy rank; see ``StaticRows.for_rank_load``."""
        num_local = self.num_experts // self.world_size
        most = self._num_tokens * min(self.num_topk, num_local)
        num_rows = _skewed(self._num_tokens * self.num_topk, self.world_size, skew, most)
        check_integer("expert_alignment", expert_alignment, least=1)
        padded = num_rows + min(num_rows, num_local) * (expert_alignment - 1)
        return padded // expert_alignment * expert_alignment

    def rows_of_expert(self, skew: float | None, expert_alignment: int) -> int:
        """Return the rows of a busy expert; see ``StaticRows.for_expert_load``."""
        num_rows = _skewed(self._num_tokens * self.num_topk, self.num_experts, skew, self._num_tokens)
        check_integer("expert_alignment", expert_alignment, least=1)
        return -(-num_rows // expert_alignment) * expert_alignment


def _skewed(num_pairs: int, num_parts: int, skew: float | None, most: int) -> int:
    """Return the rows of a part with ``skew`` times the mean, at most ``most``; those for ``None``."""
    if skew is None:
        return most
    if not isinstance(skew, (int, float)) or isinstance(skew, bool):
        raise TypeError(f"skew must be a number, got {skew!r}")
    if not 1.0 <= skew < math.inf:
        raise ValueError(f"skew must be at least 1, the load of the busiest over the mean, got {skew}")
    return min(most, math.ceil(skew * num_pairs / num_parts))
