"""Copies of experts by the calls of DeepEP 2.5 (``lb_``): weights to places that ranks ask for, gradients back.

Contract: ``buffers/ep.py`` and ``buffers/allocator.py`` of DeepEP 2.5 (MIT licence). R ranks of the group; each has L
experts of its own, those of rank r are r * L to r * L + L - 1, and C places for copies. ``redundancy_mapping`` is int32
(R, C), the expert in each place, -1 for none, the same on all ranks; the host waits for it. All calls are collectives.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from fusco.api.functional import all_to_all, move_experts
from fusco.core.config import FSDP_SMS
from fusco.integrations.along_handles import require_shape
from fusco.integrations.deep_ep.base import BufferBase, Event
from fusco.integrations.deep_ep.events import EventHandle, EventOverlap, wait_for

_ALIGNMENT = 16  # bytes
_Tensors = torch.Tensor | Sequence[torch.Tensor]


class BufferAllocator:
    """Tensors in one run of memory, which get it when a buffer is made; before, they are on the device ``meta``.

    Attributes:
        num_bytes: of the memory so far.
        materialized: True once the tensors have it.
    """

    def __init__(self) -> None:
        self.num_bytes, self.materialized = 0, False
        self._tensors: list[tuple[int, torch.Tensor]] = []  # with their first byte

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return another tensor; raises ``ValueError`` once there is memory."""
        self._require_open()
        tensor = torch.empty(tuple(shape), dtype=dtype, device="meta")
        self._tensors.append((self.num_bytes, tensor))
        self.num_bytes += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        return tensor

    def materialize(self, storage: torch.Tensor) -> None:
        """Put the tensors into uint8 (num_bytes,); raises ``ValueError`` for other memory, or a second time."""
        self._require_open()
        if storage.dtype != torch.uint8:
            raise ValueError(f"memory of tensors must be uint8, got {storage.dtype}")
        require_shape("storage", storage, self.num_bytes)
        for first, tensor in self._tensors:
            placed = storage[first : first + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            torch.utils.swap_tensors(tensor, placed)  # type: ignore[no-untyped-call]
        self.materialized = True

    def _require_open(self) -> None:
        if self.materialized:
            raise ValueError("these tensors have their memory: make another BufferAllocator")


class ExpertCopies(BufferBase):
    """The calls that move experts and their gradients. Tensors may be in any memory."""

    def lb_get_theoretical_num_sms(self) -> int:
        """Return the SMs that fusco uses while other kernels compute."""
        return FSDP_SMS

    @torch.no_grad()
    def lb_prefetch_weights(
        self,
        redundant_expert_weights: _Tensors,
        expert_weights: _Tensors,
        redundancy_mapping: torch.Tensor,
        num_sms: int = 0,
        previous_event: Event = None,
    ) -> EventOverlap:
        """Copy experts into the places that the mapping gives them; an expert crosses to a node once.

        Args:
            redundant_expert_weights: one or several contiguous tensors (C, ...) to write to. Empty places stay.
            expert_weights: as many, (L, ...), of as many bytes an expert.
            redundancy_mapping: see the module.
            num_sms: has no effect.
            previous_event: to wait for first.

        Returns:
            An event recorded after the call, in which the host has waited for the device.
        """
        wait_for(previous_event)
        targets, sources = _as_bytes(redundant_expert_weights), _as_bytes(expert_weights)
        homes = np.arange(self._num_ranks * len(sources[0])).reshape(self._num_ranks, -1)
        move_experts(sources, homes, redundancy_mapping.cpu().numpy(), targets=targets, group=self.group)
        return EventOverlap(EventHandle())

    @torch.no_grad()
    def lb_reduce_grads(
        self,
        redundant_expert_grads: torch.Tensor,
        expert_grads: torch.Tensor,
        redundancy_mapping: torch.Tensor,
        num_sms: int = 0,
        previous_event: Event = None,
    ) -> EventOverlap:
        """Add the gradients of copies to those of their experts, in order of rank, then place.

        Args:
            redundant_expert_grads: float32 (C, hidden).
            expert_grads: float32 (L, hidden), added to in place.
            redundancy_mapping, num_sms, previous_event: as in ``lb_prefetch_weights``.
        """
        wait_for(previous_event)
        num_local, mapping = len(expert_grads), redundancy_mapping.tolist()
        places = [place for place, expert in enumerate(mapping[self._rank]) if expert >= 0]
        places.sort(key=lambda place: mapping[self._rank][place] // num_local)  # by home, then place
        homes = [mapping[self._rank][place] // num_local for place in places]
        arriving = [[e % num_local for e in of_rank if e >= 0 and e // num_local == self._rank] for of_rank in mapping]
        arrived = all_to_all(
            None,
            redundant_expert_grads[places].contiguous(),
            [len(experts) for experts in arriving],
            [homes.count(rank) for rank in range(self._num_ranks)],
            self.group,
        )
        for row, expert in zip(arrived, [expert for experts in arriving for expert in experts], strict=True):
            expert_grads[expert] += row
        return EventOverlap(EventHandle())


def _as_bytes(tensors: _Tensors) -> list[torch.Tensor]:
    """Return views uint8 (num_experts, num_bytes) of contiguous tensors (num_experts, ...)."""
    given = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    return [each.view(len(each), -1).view(torch.uint8) for each in given]
