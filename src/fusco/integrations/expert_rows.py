"""Tokens sent to their experts on communicators that grow: shared by all framework adapters."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from fusco.api.handle import Dispatched
from fusco.integrations.along_handles import SentHandle
from fusco.integrations.checked_ids import num_topk_of
from fusco.integrations.growth import GrowingCommunicators, Grown, Need


@dataclass(frozen=True, eq=False)
class SentRows(SentHandle):
    """A dispatch that can be combined."""

    dispatched: Dispatched

    @property
    def counts_on_host(self) -> torch.Tensor:
        """Rows of each local expert without padding, int64 (num_local_experts,), in host memory."""
        return counts_on_host(self.dispatched)


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


@dataclass(frozen=True)
class ExpertRows:
    """Dispatches among the ranks of a group, whose experts are in equal runs of consecutive ones; with gradients."""

    comms: GrowingCommunicators
    num_experts: int  # of all ranks together

    @classmethod
    def of_group(cls, group: dist.ProcessGroup, num_experts: int) -> ExpertRows:
        """Return dispatches on the communicators of a group, which all its layers share."""
        comms = _BY_GROUP.get(group)
        if comms is None or comms.is_closed:
            comms = _BY_GROUP[group] = GrowingCommunicators(group)
        return cls(comms, num_experts)

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

        def dispatch(grown: Grown) -> SentRows:
            sent = grown.comm.dispatch(payloads, topk_idx, topk_weights, with_weights=with_weights, **options)
            return SentRows(self.comms, grown, sent.handle, sent)

        with self.comms.rejecting():
            need = Need.of(payloads, num_topk_of(topk_idx, len(payloads[0])))
        purpose = "dispatch", self.num_experts
        return self.comms.run(purpose, self.num_experts, need, payloads[0].device, dispatch)


# Module state: the process groups of torch, whose lifetime it follows, are global too.
_BY_GROUP: weakref.WeakKeyDictionary[dist.ProcessGroup, GrowingCommunicators] = weakref.WeakKeyDictionary()
