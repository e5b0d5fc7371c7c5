"""Routing maps as indices, of a width that all calls share."""

from __future__ import annotations

import torch

from fusco.integrations.dense_routing import map_to_indices

_STEP = 4  # the width is rounded up to a multiple of it


class RoutingMaps:
    """Makes indices of maps; ``width`` is the number of experts per token that they have room for, 0 at first."""

    def __init__(self) -> None:
        self.width = 0
        self._lost_on_host: torch.Tensor | None = None

    def indices_of(self, routing_map: torch.Tensor) -> torch.Tensor:
        """Return a map as indices. Calls on the CPU, and the first with any, count the experts of tokens first."""
        if not self.width or not routing_map.is_cuda:
            num_topk = int(routing_map.sum(1).max()) if len(routing_map) else 0
            self.width = max(self.width, min(-(-num_topk // _STEP) * _STEP, routing_map.shape[1]))
        return map_to_indices(routing_map, max(self.width, 1))

    def widen(self, width: int) -> None:
        """Take the width of a call of all ranks: others may have seen tokens with more experts."""
        if self.width:
            self.width = max(self.width, width)

    def count_lost(self, routing_map: torch.Tensor, topk_idx: torch.Tensor) -> torch.Tensor | None:
        """Return how many experts of a map the indices lack, int64 (1,); ``None`` on the CPU, where they lack none.

        Its copy on the host is there when the host has waited for the dispatch that follows on the stream.
        """
        self._lost_on_host = None
        if not routing_map.is_cuda:
            return None
        lost = (routing_map.sum() - (topk_idx >= 0).sum())[None]
        self._lost_on_host = torch.empty(1, dtype=torch.int64, device="cpu", pin_memory=True)
        self._lost_on_host.copy_(lost, non_blocking=True)
        return lost

    def require_none_lost(self) -> None:
        """Raise ``ValueError`` if the indices of the last map lacked experts; the host has waited for the dispatch."""
        if self._lost_on_host is not None and int(self._lost_on_host):
            raise ValueError(
                f"routing_map has tokens with more than {self.width} experts, the most of the first call rounded up; "
                f"pass topk_idx, whose width may grow"
            )
