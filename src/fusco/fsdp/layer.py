"""The forward pass of a module whose experts are distributed."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count
from typing import cast
from weakref import WeakValueDictionary

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from fusco.core.balance import Balance
from fusco.fsdp import ops
from fusco.fsdp.dispatcher import CopyingDispatcher, Dispatcher
from fusco.fsdp.experts import Experts

# Module state: torch's operators are global and take tensors and numbers only. The weak references keep nothing alive.
_numbers = count()
_key_to_counter: WeakValueDictionary[int, RowCounter] = WeakValueDictionary()


class RowCounter:
    """Adds up the rows of each local expert of a layer in forward passes with gradients.

    Every reader counts from its own mark, so that none disturbs another.
    """

    def __init__(self) -> None:
        self._total: torch.Tensor | None = None  # int64 (num_local_experts,), on the device of the rows
        self._reader_to_mark: dict[str, torch.Tensor] = {}
        self._key = next(_numbers)
        _key_to_counter[self._key] = self

    def count(self, num_rows: torch.Tensor) -> torch.Tensor:
        """Count rows, int64 (num_local_experts,), and return them.

        Under a compiler or a dispatch mode this is an operator, which they cannot see into, and whose result is used.
        """
        if ops.is_intercepted():
            return _count(num_rows, self._key, torch.is_grad_enabled())
        if torch.is_grad_enabled():
            self.add(num_rows)
        return num_rows

    def add(self, num_rows: torch.Tensor) -> None:
        """Count rows, unless a backward pass recomputes them."""
        if torch._C._current_graph_task_id() != -1:  # noqa: SLF001  as torch.utils.checkpoint asks
            return
        with torch.no_grad():
            if self._total is None:
                self._total = torch.zeros_like(num_rows, dtype=torch.int64)
            self._total += num_rows

    def since_mark(self, reader: str) -> torch.Tensor | None:
        """Return the rows since the reader's last mark, or the beginning; ``None`` if none were ever counted."""
        if self._total is None:
            return None
        mark = self._reader_to_mark.get(reader)
        return self._total.clone() if mark is None else self._total - mark

    def mark(self, reader: str) -> None:
        """Begin to count anew for a reader."""
        if self._total is not None:
            self._reader_to_mark[reader] = self._total.clone()


@torch.library.custom_op("fusco::count_rows", mutates_args=())
def _count(num_rows: torch.Tensor, counter: int, is_training: bool) -> torch.Tensor:  # noqa: FBT001  an operator's
    if is_training and counter in _key_to_counter:
        _key_to_counter[counter].add(num_rows)
    return num_rows.clone()


@_count.register_fake
def _fake_count(num_rows: torch.Tensor, counter: object, is_training: object) -> torch.Tensor:  # noqa: ARG001  the same
    return torch.empty_like(num_rows)


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
            sent = x, top_k_index, top_k_weights, num_experts
            arrival = found = balanced.dispatch_balanced(*sent, self.balance, self.experts.weights())
            self.counter.count(found.num_rows_wanted)
            y = self.experts.run(arrival.rows, arrival.num_rows_per_expert, found.copies, arrival.num_rows_on_host)
        return self.dispatcher.combine(y, arrival).to(hidden_states.dtype)


def remember_layer(module: nn.Module, layer: ExpertParallelLayer | SlicedLayer) -> None:
    """Let ``layer_of`` find the layer of a module whose ``forward`` calls it through another function."""
    setattr(module, _LAYER, layer)


def layer_of(module: nn.Module) -> ExpertParallelLayer | None:
    """Return what runs a module of experts whose tokens fusco moves; ``None`` for any other module."""
    layer = vars(module).get(_LAYER) or vars(module).get("forward")
    layer = layer.layer if isinstance(layer, SlicedLayer) else layer
    return layer if isinstance(layer, ExpertParallelLayer) else None


def layers_of(model: nn.Module) -> dict[str, ExpertParallelLayer]:
    """Return what runs the modules of experts whose tokens fusco moves, by their names in a model, in order."""
    return {name: layer for name, module in model.named_modules() if (layer := layer_of(module))}


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
