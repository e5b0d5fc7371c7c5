"""Measurements inside a step: the time of dispatch and combine, forward and backward, and the routing."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from fusco.fsdp.dispatcher import Arrival
from fusco.fsdp.timed_dispatcher import TimedDispatcher


@dataclass
class ObservingDispatcher(TimedDispatcher):
    """Also records the routing of the latest step."""

    num_layers: int  # calls of a forward pass; later ones in a step are recomputations and not recorded
    keeps_routing: bool = False  # whether to record ``topk_idx``
    topk_idx: list[torch.Tensor] = field(default_factory=list)  # for each layer of this step, the routing, if recorded

    def dispatch(
        self, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor, num_experts: int, *more: int
    ) -> Arrival:
        if self.keeps_routing and len(self.topk_idx) < self.num_layers:
            self.topk_idx.append(topk_idx)
        return super().dispatch(x, topk_idx, topk_weights, num_experts, *more)
