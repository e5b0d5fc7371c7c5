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
from fusco.integrations.along_handles import SentHandle
from fusco.integrations.growth import GrowingCommunicator, Need


@dataclass(frozen=True, eq=False)
class SentRows(SentHandle):
    """A dispatch that can be combined."""

    dispatched: Dispatched

    @property
    def counts_on_host(self) -> torch.Tensor:
        """Rows of each local expert without padding, int64 (num_local_experts,), in host memory."""
        return counts_on_host(self.dispatched)

    def combine(self, rows: torch.Tensor, *, is_weighted: bool, launch: Launch | None = None) -> torch.Tensor:
        """Return rows (num_rows, hidden) to their tokens, with the weights of the dispatch or as they are."""
        return self.comm.combine(rows, self.handle, weights="topk" if is_weighted else None, launch=launch)


def counts_on_host(dispatched: Dispatched) -> torch.Tensor:
    """Return the rows of each local expert in host memory; another wait of the host if they came without the size."""
    counts = dispatched.num_rows_per_expert_on_host
    return dispatched.num_rows_per_expert.cpu() if counts is None else counts


def in_blocks(counts: torch.Tensor, alignment: int) -> torch.Tensor:
    """Return the rows of each expert with padding: the next multiples of ``alignment``."""
    return (counts + alignment - 1).div(alignment, rounding_mode="floor") * alignment


def ends_in_blocks(counts: torch.Tensor, alignment: int) -> torch.Tensor:
    """Return the end of each expert's rows, int32: the start of its block and the number of its rows."""
    blocks = in_blocks(counts, alignment)
    return (blocks.cumsum(0) - blocks + counts).int()


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
            return SentRows(comm, capacity.max_bytes_per_token, sent.handle, sent)

        with self.comms.rejecting():
            need = Need.of(payloads, topk_idx.shape[1])
        return self.comms.run(need, payloads[0].device, dispatch)


# Module state: the process groups of torch, whose lifetime it follows, are global too.
_BY_GROUP: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[int, ExpertRows]] = weakref.WeakKeyDictionary()
