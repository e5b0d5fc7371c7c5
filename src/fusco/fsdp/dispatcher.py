"""The interface between a layer's experts and what moves their rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist

from fusco.core.balance import Balance


@dataclass(frozen=True)
class Arrival:
    """The rows that arrived for this rank's experts.

    Attributes:
        rows: (num_rows, hidden), expert-major: blocks in order of local expert, rows inside in order of (source rank,
            token, k).
        num_rows_per_expert: int64 (num_local_experts,), on the device of the rows.
        ticket: what the dispatcher needs to return the results.
        num_rows_on_host: the same as ``num_rows_per_expert`` in host memory; ``None`` if the host would have to wait.
    """

    rows: torch.Tensor
    num_rows_per_expert: torch.Tensor
    ticket: Any
    num_rows_on_host: torch.Tensor | None = None


@dataclass(frozen=True)
class ExpertCopies:
    """Weights of other ranks' experts in this rank's spare places.

    Attributes:
        weights: by name, (spare_places, ...), in the order of their blocks; nothing if the plan, which is that of all
            ranks, copies no expert.
        event: on a stream of CUDA, when they are there; ``None`` if the current stream's order says so.
    """

    weights: Mapping[str, torch.Tensor]
    event: torch.cuda.Event | None = None

    def wait(self) -> Mapping[str, torch.Tensor]:
        """Return the weights, for further work of the current stream."""
        if self.event is not None:
            stream = torch.cuda.current_stream()
            stream.wait_event(self.event)
            for weight in self.weights.values():
                weight.record_stream(stream)
        return self.weights


@dataclass(frozen=True, kw_only=True)
class BalancedArrival(Arrival):
    """The rows that arrived for this rank's experts, and behind them for its copies of others.

    Attributes:
        copies: weights of those experts.
        num_rows_wanted: rows of this rank's experts, wherever they are computed, integers (num_local_experts,).
    """

    copies: ExpertCopies
    num_rows_wanted: torch.Tensor


class Dispatcher(Protocol):
    """Moves rows among the ranks of an "ep" group, with gradients. Both verbs are collectives.

    A dispatcher has no state of a call: one serves all layers, and activation checkpointing dispatches twice.
    """

    @property
    def group(self) -> dist.ProcessGroup:
        """Ranks among which experts are distributed: ``EPMesh.ep_group``."""

    def dispatch(
        self, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor, num_experts: int
    ) -> Arrival:
        """Send tokens to their experts.

        Args:
            x: (num_tokens, hidden).
            topk_idx: int64 (num_tokens, num_topk), of the ``num_experts`` experts of all ranks; -1 means no expert.
            topk_weights: (num_tokens, num_topk), the weights that ``combine`` applies.
            num_experts: a multiple of the number of ranks; each owns a block of consecutive experts.
        """

    def combine(self, y: torch.Tensor, arrival: Arrival) -> torch.Tensor:
        """Return the experts' results (num_rows, hidden) as (num_tokens, hidden), weighted and summed over k."""

    def synchronize(self) -> None:
        """Wait until all rows have arrived, and raise if some have not; not a collective.

        Call it before anything that cannot be undone, such as a step of the optimizer: if rows of a failed rank are
        missing, the device continues with undefined data.
        """


@runtime_checkable
class CopyingDispatcher(Dispatcher, Protocol):
    """A dispatcher that can even out the work of a batch by copies of busy experts."""

    def dispatch_balanced(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        num_experts: int,
        balance: Balance,
        weights: Mapping[str, torch.Tensor],
    ) -> BalancedArrival:
        """Send tokens to their experts, or to copies of these, as all ranks plan for this batch; and send the copies.

        Args:
            x: as for ``dispatch``.
            topk_idx: as for ``dispatch``.
            topk_weights: as for ``dispatch``.
            num_experts: as for ``dispatch``.
            balance: what the plan may do.
            weights: of this rank's experts, (num_local_experts, ...). Gradients of copies return to them.
        """
