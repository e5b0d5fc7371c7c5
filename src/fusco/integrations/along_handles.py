"""Handles that callers pass back, and dispatches along them together with the weights of tokens' experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch

from fusco.api.communicator import Communicator
from fusco.api.handle import Handle
from fusco.api.membership import Rejecting
from fusco.core.config import Launch
from fusco.core.rows import row_bytes
from fusco.integrations.growth import GrowingCommunicators, Grown

_Kind = TypeVar("_Kind")


def require_handle(handle: Any, kind: type[_Kind]) -> _Kind:
    """Return a caller's handle; raise ``TypeError`` unless it is of this kind."""
    if not isinstance(handle, kind):
        raise TypeError(f"this call needs the handle of a dispatch, got {type(handle).__name__}")
    return handle


def element_of(handle: Any, place: int, kind: type[_Kind], maker: str) -> _Kind:
    """Return an element of a caller's handle; ``TypeError`` unless it is of ``kind``, as what ``maker`` returns is."""
    is_sequence = isinstance(handle, (list, tuple))  # a framework may make a list of it
    parts = tuple(handle) if is_sequence else ()
    element = parts[place] if place < len(parts) else None
    if not isinstance(element, kind):
        names = ", ".join(type(part).__name__ for part in parts)
        given = f"({names})" if is_sequence else type(handle).__name__
        raise TypeError(f"this call needs the handle that {maker} returned, got {given}")
    return element


def require_shape(name: str, tensor: torch.Tensor | None, *shape: int) -> None:
    """Raise ``ValueError`` unless an argument, if there is one, has a shape: PyTorch would gather from a larger one."""
    if tensor is not None and tensor.shape != shape:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}, but this call needs {shape}")


def biases_of(bias: torch.Tensor | tuple[torch.Tensor, ...] | None, *shape: int) -> tuple[torch.Tensor, ...]:
    """Return what a caller wants added to sums of a shape; raises ``ValueError`` for another shape."""
    biases = () if bias is None else bias if isinstance(bias, tuple) else (bias,)
    for each in biases:
        require_shape("bias", each, *shape)
    return biases


@dataclass(frozen=True, eq=False)
class SentHandle:
    """The handle of a dispatch, and the communicator that owns it."""

    comms: GrowingCommunicators
    grown: Grown
    handle: Handle

    @property
    def comm(self) -> Communicator:
        """The communicator of the handle."""
        return self.grown.comm

    def rejecting(self) -> Rejecting:
        """Make an error inside a rejection of the call along this handle that all other ranks make."""
        return self.comms.rejecting()

    def dispatch_again(
        self, payloads: Sequence[torch.Tensor], topk_weights: torch.Tensor | None, launch: Launch | None = None
    ) -> tuple[tuple[torch.Tensor, ...], torch.Tensor | None]:
        """Send other rows and other weights along the handle; in one collective, if there is room for both.

        Payloads are (num_tokens, ...), weights (num_tokens, num_topk). Returns the rows of each payload, and for each
        row all weights of its token (num_rows, num_topk), or ``None``.
        """
        comm, handle = self.comms.turn_to(self.grown, "dispatch_again"), self.handle
        if topk_weights is None:
            return comm.dispatch_again(payloads, handle, launch=launch), None
        if sum(map(row_bytes, payloads)) + row_bytes(topk_weights) <= self.grown.capacity.max_bytes_per_token:
            *rows, of_rows = comm.dispatch_again([*payloads, topk_weights], handle, launch=launch)
            return tuple(rows), of_rows
        arrived = comm.dispatch_again(payloads, handle, launch=launch)
        return arrived, comm.dispatch_again(topk_weights, handle, launch=launch)[0]

    def combine(
        self, parts: Sequence[torch.Tensor], launch: Launch | None = None, weights: Literal["topk"] | None = None
    ) -> tuple[torch.Tensor, ...]:
        """Add up the rows of each token in each of several tensors: (num_tokens, hidden); one may have ``weights``."""
        comm = self.comms.turn_to(self.grown, "combine")
        if len(parts) == 1:  # which costs less from the second call on
            return (comm.combine(parts[0], self.handle, weights=weights, launch=launch),)
        return comm.combine_all(parts, self.handle, launch=launch)

    def sums_of(
        self, parts: Sequence[torch.Tensor], launch: Launch, biases: Sequence[torch.Tensor] = ()
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the sums of the first part plus biases, and those of the second, ``None`` without one."""
        sums, *of_tokens = self.combine(parts, launch)
        for each in biases:
            sums += each
        return sums, of_tokens[0] if of_tokens else None
