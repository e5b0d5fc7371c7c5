"""Tokens sent to their experts on communicators that grow: shared by all framework adapters."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

from fusco.api.autograd import rows_of_weights, weights_of_slots
from fusco.api.communicator import Communicator
from fusco.api.handle import Dispatched
from fusco.core.checked_ids import num_topk_of
from fusco.core.config import Launch
from fusco.core.quantization import Quantize
from fusco.integrations.along_handles import SentHandle, padded, require_shape
from fusco.integrations.group_communicators import GroupCommunicators


@dataclass(frozen=True, eq=False, kw_only=True)
class SentRows(SentHandle):
    """A dispatch that can be combined; ``SentHandle`` says more of it."""

    dispatched: Dispatched
    alignment: int  # of the experts' blocks, in rows

    @property
    def counts_on_host(self) -> torch.Tensor:
        """Rows of each local expert without padding, int64 (num_local_experts,), in host memory.

        The host waits once more if they did not come with the size.
        """
        counts = self.dispatched.num_rows_per_expert_on_host
        return self.dispatched.num_rows_per_expert.cpu() if counts is None else counts

    @cached_property
    def blocks_on_host(self) -> torch.Tensor:
        """The same with padding."""
        return in_blocks(self.counts_on_host, self.alignment)

    def replace_weights(self, topk_weights: torch.Tensor, launch: Launch | None = None) -> None:
        """Make ``combine`` with ``weights="topk"`` apply other weights than those of the dispatch, which had some.

        They are float32 (num_tokens, num_topk) and travel in a collective of their own. They stay until the next ones.
        """
        comm = self.comms.turn_to(self.comm, "replace_weights")
        (of_rows,) = comm.dispatch_again(topk_weights, self.handle, launch=launch)
        self.handle.plan.replace_weights(of_rows.view(self.handle.num_rows, -1))

    def rows_of_values(self, values: torch.Tensor) -> torch.Tensor:
        """Return one value of each row, (num_rows,), as rows of float32 that a combine can add up."""
        values = values.reshape(-1).float()
        require_shape("values of rows", values, self.handle.num_rows)
        return rows_of_weights(values, self.handle)

    def dispatch_again(
        self, payloads: Sequence[torch.Tensor], topk_weights: torch.Tensor | None, launch: Launch | None = None
    ) -> tuple[tuple[torch.Tensor, ...], torch.Tensor | None]:
        """Send other rows and weights along the handle; return the rows of each payload and their weights (num_rows,).

        Payloads are (num_tokens, ...), weights (num_tokens, num_topk).
        """
        rows, of_rows = super().dispatch_again(payloads, topk_weights, launch)
        return rows, None if of_rows is None else weights_of_slots(of_rows, self.handle)


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

    comms: GroupCommunicators
    num_experts: int  # of all ranks together
    # tokens of a rank that there is room for from the first call on
    max_tokens: int = 1
    # ranks may have different numbers of experts a token: later columns are filled up with -1
    may_differ: bool = False

    @classmethod
    def of_group(cls, group: dist.ProcessGroup, num_experts: int) -> ExpertRows:
        """Return dispatches on the communicators of a group, which all its layers share."""
        comms = _BY_GROUP.get(group)
        if comms is None or comms.is_closed:
            comms = _BY_GROUP[group] = GroupCommunicators(group)
        return cls(comms, num_experts)

    def dispatch(
        self,
        payloads: Sequence[torch.Tensor],
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor | None,
        *,
        with_weights: bool = True,
        expert_alignment: int = 1,
        values_per_element: int = 1,
        verb: str = "dispatch",
        quantize: Quantize | None = None,
        **options: Any,
    ) -> SentRows:
        """Send tokens to their experts; a collective. Options are those of ``Communicator.dispatch``.

        ``verb`` is the caller's name of the call, which all ranks must agree on. Rows that come back have
        ``values_per_element`` times as many columns as the first payload: 2 for FP4 values in bytes.
        """

        def dispatch(comm: Communicator) -> SentRows:
            ids, weights = topk_idx, topk_weights
            if self.may_differ:
                width = comm.capacity.num_topk
                with self.comms.rejecting():
                    ids, weights = padded(ids, width, -1), None if weights is None else padded(weights, width, 0)
            call = {"expert_alignment": expert_alignment, "with_weights": with_weights, "quantize": quantize, **options}
            sent = comm.dispatch(payloads, ids, weights, **call)
            return SentRows(
                comms=self.comms,
                comm=comm,
                capacity=comm.capacity,
                topology=comm.topology,
                handle=sent.handle,
                topk_idx=ids,
                num_topk=topk_idx.shape[1],
                num_experts=self.num_experts,
                dispatched=sent,
                alignment=expert_alignment,
            )

        with self.comms.rejecting():
            num_topk = num_topk_of(topk_idx, len(payloads[0]))
            need = self.comms.need_of(payloads, num_topk, self.max_tokens, values_per_element, quantize)
        return self.comms.run((verb, self.num_experts), self.num_experts, need, payloads[0].device, dispatch)


# Module state: the process groups of torch, whose lifetime it follows, are global too.
_BY_GROUP: weakref.WeakKeyDictionary[dist.ProcessGroup, GroupCommunicators] = weakref.WeakKeyDictionary()
