"""Routing as a dense map of tokens and experts, and as indices, of a width that all calls may share."""

from __future__ import annotations

import torch

_STEP = 4  # the width is rounded up to a multiple of it


def indices_to_map(
    topk_idx: torch.Tensor, topk_weights: torch.Tensor, num_of_tokens: int, num_of_experts: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the routing as a bool map and its weights as float32, both (num_tokens, num_experts).

    Ids are int64 (num_tokens, num_topk), -1 for no expert; weights float32 of that shape.

    >>> routing_map, probs = indices_to_map(torch.tensor([[2, -1]]), torch.tensor([[0.5, 9.0]]), 1, 3)
    >>> routing_map.tolist(), probs.tolist()
    ([[False, False, True]], [[0.0, 0.0, 0.5]])
    """
    # One more column, for pairs without an expert.
    places = torch.where(topk_idx < 0, num_of_experts, topk_idx)
    routing_map = torch.zeros(num_of_tokens, num_of_experts + 1, dtype=torch.bool, device=topk_idx.device)
    probs = torch.zeros(num_of_tokens, num_of_experts + 1, dtype=torch.float32, device=topk_idx.device)
    routing_map.scatter_(1, places, value=True)
    probs.scatter_(1, places, topk_weights.float())
    return routing_map[:, :-1].contiguous(), probs[:, :-1].contiguous()


def map_to_indices(routing_map: torch.Tensor, num_topk: int) -> torch.Tensor:
    """Return the first ``num_topk`` experts of each token in ascending order, int64 (num_tokens, num_topk).

    Tokens with fewer experts have -1 behind them.

    >>> map_to_indices(torch.tensor([[True, False, True], [False, False, False]]), 2).tolist()
    [[0, 2], [-1, -1]]
    """
    num_experts = routing_map.shape[1]
    descending = torch.arange(num_experts, 0, -1, dtype=torch.int32, device=routing_map.device)
    first = (routing_map * descending).topk(min(num_topk, num_experts), dim=1).values
    return (num_experts - first.long()).masked_fill_(first == 0, -1)


def places_of(topk_idx: torch.Tensor) -> torch.Tensor:
    """Return where ``scattered`` puts values of experts: one column behind the expert's, and the first for none."""
    return (topk_idx + 1).clamp_(min=0)


def scattered(places: torch.Tensor, values: torch.Tensor, num_columns: int) -> torch.Tensor:
    """Return values (num_rows, k) by column: (num_rows, num_columns), zero without a value; a view.

    >>> scattered(places_of(torch.tensor([[2, -1]])), torch.tensor([[0.5, 9.0]]), 3).tolist()
    [[0.0, 0.0, 0.5]]
    """
    # The first column is for no expert, the last for ids that are none.
    return values.new_zeros(len(places), num_columns + 2).scatter_(1, places, values)[:, 1:-1]


class RoutingMaps:
    """Makes indices of maps; ``width`` is the number of experts per token that they have room for, 0 at first."""

    def __init__(self) -> None:
        self.width = 0
        self.lost: torch.Tensor | None = None  # experts of the last map that its indices lack, int64 (1,), if counted
        self._lost_on_host = torch.zeros(1, dtype=torch.int64, device="cpu")

    def indices_of(self, routing_map: torch.Tensor) -> torch.Tensor:
        """Return a map as indices. Calls on the CPU, and the first with any, count the experts of tokens first."""
        if not self.width or not routing_map.is_cuda:
            num_topk = int(routing_map.sum(1).max()) if len(routing_map) else 0
            self.width = max(self.width, min(-(-num_topk // _STEP) * _STEP, routing_map.shape[1]))
        topk_idx = map_to_indices(routing_map, max(self.width, 1))
        if routing_map.is_cuda:
            self._count_lost(routing_map, topk_idx)
        return topk_idx

    def widen(self, width: int) -> None:
        """Take the width of a call of all ranks: others may have seen tokens with more experts."""
        if self.width:
            self.width = max(self.width, width)

    def require_none_lost(self) -> None:
        """Raise ``ValueError`` if the indices of the last map lacked experts; the host has waited for the dispatch."""
        if self.lost is not None and int(self._lost_on_host):
            raise ValueError(
                f"routing_map has tokens with more than {self.width} experts, the most of the first call rounded up; "
                f"pass topk_idx, whose width may grow"
            )

    def _count_lost(self, routing_map: torch.Tensor, topk_idx: torch.Tensor) -> None:
        """Count them on the device; the copy on the host is there when it has waited for the dispatch that follows."""
        self.lost = (routing_map.sum() - (topk_idx >= 0).sum())[None]
        self._lost_on_host = torch.empty(1, dtype=torch.int64, device="cpu", pin_memory=True)
        self._lost_on_host.copy_(self.lost, non_blocking=True)
