"""Tokens sent to their experts on communicators that grow: what adapters of frameworks have in common."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from fusco.api.communicator import Communicator
from fusco.api.handle import Dispatched
from fusco.core.config import Launch
from fusco.integrations.growth import GrowingCommunicator, Need


@dataclass(frozen=True)
class SentRows:
    """A dispatch, and the communicator that owns its handle."""

    comm: Communicator
    max_bytes_per_token: int  # of the communicator
    dispatched: Dispatched

    @property
    def counts_on_host(self) -> torch.Tensor:
        """Rows of each local expert without padding, int64 (num_local_experts,), in host memory."""
        return counts_on_host(self.dispatched)

    def combine(self, rows: torch.Tensor, *, is_weighted: bool, launch: Launch | None = None) -> torch.Tensor:
        """Return rows (num_rows, hidden) to their tokens, with the weights of the dispatch or as they are."""
        handle = self.dispatched.handle
        return self.comm.combine(rows, handle, weights="topk" if is_weighted else None, launch=launch)


def counts_on_host(dispatched: Dispatched) -> torch.Tensor:
    """Return the rows of each local expert in host memory; another wait of the host if they came without the size."""
    counts = dispatched.num_rows_per_expert_on_host
    return dispatched.num_rows_per_expert.cpu() if counts is None else counts


class ExpertRows:
    """Dispatches among the ranks of a group, whose experts are in equal runs of consecutive ones; with gradients."""

    def __init__(self, group: dist.ProcessGroup, num_experts: int) -> None:
        """Nothing is allocated before the first call."""
        self.comms = GrowingCommunicator(group, num_experts)

    @classmethod
    def of_group(cls, group: dist.ProcessGroup, num_experts: int) -> ExpertRows:
        """Return the same object for all layers of a group, whose communicators they share."""
        of_group = _BY_GROUP.setdefault(group, {})
        if num_experts not in of_group or of_group[num_experts].comms.is_closed:
            of_group[num_experts] = cls(group, num_experts)
        return of_group[num_experts]

    def dispatch(
        self,
        payloads: Sequence[torch.Tensor],
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor | None,
        *,
        with_weights: bool = True,
        **options: Any,
    ) -> SentRows:
        """Send tokens to their experts; a collective. Options are those of ``Communicator.dispatch``."""

        def dispatch(comm: Communicator, capacity: Need) -> SentRows:
            sent = comm.dispatch(payloads, topk_idx, topk_weights, with_weights=with_weights, **options)
            return SentRows(comm, capacity.max_bytes_per_token, sent)

        with self.comms.rejecting():
            need = Need.of(payloads, topk_idx.shape[1])
        return self.comms.run(need, payloads[0].device, dispatch)


# Module state: the process groups of torch, whose lifetime it follows, are global too.
_BY_GROUP: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[int, ExpertRows]] = weakref.WeakKeyDictionary()
