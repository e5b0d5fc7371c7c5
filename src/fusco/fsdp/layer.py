"""The forward pass of a module whose experts are distributed."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fusco.fsdp.dispatcher import Dispatcher
from fusco.fsdp.experts import Experts


@dataclass(frozen=True, eq=False)
class ExpertParallelLayer:
    """Replaces the ``forward`` of a module of experts: dispatch, this rank's experts, combine.

    A rank without tokens takes part in every exchange, and a rank whose experts get no rows computes empty blocks. So
    no rank waits for another in the backward pass, and no gradient is missing.
    """

    experts: Experts
    dispatcher: Dispatcher

    def __call__(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Return the weighted sum of each token's experts, (num_tokens, hidden), as the original module does."""
        # Cast before the exchange, so that under mixed precision narrow rows travel; weights keep their precision.
        x = hidden_states.to(self.experts.local(self.experts.up_name).dtype)
        arrival = self.dispatcher.dispatch(x, top_k_index, top_k_weights, self.experts.num_experts)
        y = self.experts.run(arrival.rows, arrival.num_rows_per_expert)
        return self.dispatcher.combine(y, arrival).to(hidden_states.dtype)
