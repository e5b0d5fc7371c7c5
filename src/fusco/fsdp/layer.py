"""The forward pass of a module whose experts are distributed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from fusco.core.balance import Balance
from fusco.fsdp.dispatcher import CopyingDispatcher, Dispatcher
from fusco.fsdp.experts import Experts
from fusco.fsdp.row_counts import RowCounter

_LAYER = "_fusco_layer"  # the attribute


@dataclass(frozen=True, eq=False)
class ExpertParallelLayer:
    """Replaces the ``forward`` of a module of experts: dispatch, this rank's experts, combine.

    A rank without tokens takes part in every exchange, and a rank whose experts get no rows computes empty blocks. So
    no rank waits for another in the backward pass, and no gradient is missing.
    """

    experts: Experts
    dispatcher: Dispatcher
    balance: Balance | None = None  # for a plan of each batch, by a ``CopyingDispatcher``
    counter: RowCounter = field(default_factory=RowCounter)

    def __call__(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Return the weighted sum of each token's experts, (num_tokens, hidden), as the original module does."""
        if self.experts.num_zero_experts:
            return self._with_zero_experts(hidden_states, top_k_index, top_k_weights)
        return self._run(hidden_states, top_k_index, top_k_weights)

    def _with_zero_experts(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Add a token's own row for each of its zero experts, which no dispatch sees."""
        is_zero = top_k_index >= self.experts.num_experts
        out = self._run(hidden_states, top_k_index.masked_fill(is_zero, -1), top_k_weights)
        share = top_k_weights.masked_fill(~is_zero, 0).sum(1, keepdim=True)
        return out + (hidden_states * share).to(out.dtype)

    def _run(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        # Cast before the exchange, so that under mixed precision narrow rows travel; weights keep their precision.
        x = hidden_states.to(self.experts.local(self.experts.up_name).dtype)
        num_experts = self.experts.num_experts
        if self.balance is None:
            arrival = self.dispatcher.dispatch(x, top_k_index, top_k_weights, num_experts)
            num_rows = self.counter.count(arrival.num_rows_per_expert)
            y = self.experts.run(arrival.rows, num_rows)
        else:
            balanced = cast("CopyingDispatcher", self.dispatcher)
            arrival = found = balanced.dispatch_balanced(x, top_k_index, top_k_weights, num_experts, self.balance)
            self.counter.count(found.num_rows_wanted)
            copies = balanced.copy_experts(found, self.experts.weights())
            y = self.experts.run(arrival.rows, arrival.num_rows_per_expert, copies, arrival.num_rows_on_host)
        return self.dispatcher.combine(y, arrival).to(hidden_states.dtype)


def remember_layer(module: nn.Module, layer: ExpertParallelLayer | SlicedLayer) -> None:
    """Let ``layer_of`` find the layer of a module whose ``forward`` calls it through another function."""
    setattr(module, _LAYER, layer)


def layer_of(module: nn.Module) -> ExpertParallelLayer | None:
    """Return what runs a module of experts whose tokens fusco moves; ``None`` for any other module."""
    layer = vars(module).get(_LAYER) or vars(module).get("forward")
    layer = layer.layer if isinstance(layer, SlicedLayer) else layer
    return layer if isinstance(layer, ExpertParallelLayer) else None


@dataclass(frozen=True, eq=False)
class SlicedLayer:
    """A layer whose tokens several ranks have: each computes a slice, and all get all slices."""

    layer: ExpertParallelLayer  # of a slice
    mesh: DeviceMesh  # of one dimension, the ranks with the same tokens. All of them get the same gradients.

    def __call__(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Return what ``layer`` returns for all tokens."""
        inputs = (hidden_states, top_k_index, top_k_weights)
        whole = [DTensor.from_local(each, self.mesh, [Replicate()], run_check=False) for each in inputs]
        out = self.layer(*(each.redistribute(placements=[Shard(0)]).to_local() for each in whole))
        shape = hidden_states.shape
        slices = DTensor.from_local(out, self.mesh, [Shard(0)], run_check=False, shape=shape, stride=(shape[1], 1))
        return slices.full_tensor()
