"""Handles that callers pass back, and calls along them together with the weights of tokens' experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import torch

from fusco.api.communicator import Communicator
from fusco.api.handle import Handle
from fusco.api.membership import Rejecting
from fusco.core.config import Capacity, Launch
from fusco.core.current_stream import capture_number, raw_stream_of
from fusco.core.rows import row_bytes
from fusco.core.topology import Topology
from fusco.integrations.group_communicators import GroupCommunicators
from fusco.integrations.routing_maps import places_of, scattered


class KeptTensors:
    """Tensors by name, which live as long as the object that has them. Calls must not change them.

    A call on another CUDA stream makes its own, as nothing orders the two streams. What a graph makes is in its own
    memory, and undefined before its first replay: it is kept for calls of the capture that this object was made in, and
    for no others.
    """

    def __init__(self) -> None:
        self._made: dict[tuple[str, int], torch.Tensor] = {}  # by name and stream
        self._capture = capture_number()

    def get(self, name: str, device: torch.device, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return the tensor of this name on the current stream of a device; ``make`` makes it if it is not kept."""
        if device.type != "cuda":
            return self._kept((name, 0), make)
        capture, key = capture_number(), (name, _stream(device))
        if capture == self._capture:
            return self._kept(key, make)
        return make() if self._capture or key not in self._made else self._made[key]

    def _kept(self, key: tuple[str, int], make: Callable[[], torch.Tensor]) -> torch.Tensor:
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]


def _stream(device: torch.device) -> int:
    if raw_stream_of is None:
        return torch.cuda.current_stream(device).cuda_stream
    return int(raw_stream_of(device.index))


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


def padded(of_tokens: torch.Tensor, width: int, value: int) -> torch.Tensor:
    """Return (num_tokens, k) with more columns of a value, as all ranks dispatch the same number of experts a token."""
    missing = width - of_tokens.shape[1]
    return torch.nn.functional.pad(of_tokens, (0, missing), value=value) if missing > 0 else of_tokens.contiguous()


@dataclass(frozen=True, eq=False, kw_only=True)
class SentHandle:
    """A routing that was dispatched, and the communicator that owns it, as it was then."""

    comms: GroupCommunicators
    comm: Communicator
    capacity: Capacity
    topology: Topology
    handle: Handle
    # of this rank's tokens, int64 (num_tokens, num_topk of all ranks), or ``None`` if only ranks were given
    topk_idx: torch.Tensor | None
    num_topk: int  # of this rank's call; later columns of ``topk_idx`` are -1
    num_experts: int  # of all ranks together
    kept: KeptTensors = field(default_factory=KeptTensors)  # at most 17 bytes a row and k, 16 a token and k

    def rejecting(self) -> Rejecting:
        """Make an error inside a rejection of the call along this handle that all other ranks make."""
        return self.comms.rejecting()

    def require_topk_idx(self) -> torch.Tensor:
        """Return the experts of this rank's tokens; raises ``ValueError`` if only ranks were given."""
        if self.topk_idx is None:
            raise ValueError(
                "weights and values of experts need the handle of a dispatch with topk_idx; this one was made with "
                "is_token_in_rank only"
            )
        return self.topk_idx

    def weights_of_tokens(
        self, topk_weights: torch.Tensor | None, probs: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """Return weights of this rank's tokens as they are sent, float32 (num_tokens, num_topk of all ranks).

        They are given as (num_tokens, num_topk), or by expert (num_tokens, num_experts), which precede.
        """
        if probs is not None:
            topk_idx = self.require_topk_idx()
            require_shape("probs", probs, len(topk_idx), self.num_experts)
            return probs.float().gather(1, self.kept.get("columns", probs.device, lambda: topk_idx.clamp(min=0)))
        if topk_weights is None:
            return None
        topk_idx = self.require_topk_idx()
        require_shape("topk_weights", topk_weights, len(topk_idx), self.num_topk)
        return padded(topk_weights.float(), topk_idx.shape[1], 0)

    def by_expert(self, values: torch.Tensor) -> torch.Tensor:
        """Return values of this rank's tokens (num_tokens, num_topk) by expert: (num_tokens, num_experts), a view."""
        places = self.kept.get("places of tokens", values.device, lambda: places_of(self.require_topk_idx()))
        return scattered(places, values, self.num_experts)

    def rows_of_values(self, values: torch.Tensor) -> torch.Tensor:
        """Return values of rows as rows of float32 that a combine can add up for each token and k."""
        return values.float().contiguous()

    def dispatch_again(
        self, payloads: Sequence[torch.Tensor], topk_weights: torch.Tensor | None, launch: Launch | None = None
    ) -> tuple[tuple[torch.Tensor, ...], torch.Tensor | None]:
        """Send other rows and other weights along the handle; in one collective, if there is room for both.

        Payloads are (num_tokens, ...), weights (num_tokens, num_topk). Returns the rows of each payload, and for each
        row all weights of its token (num_rows, num_topk), or ``None``.
        """
        comm, handle = self.comms.turn_to(self.comm, "dispatch_again"), self.handle
        if topk_weights is None:
            return comm.dispatch_again(payloads, handle, launch=launch), None
        if sum(map(row_bytes, payloads)) + row_bytes(topk_weights) <= self.capacity.max_bytes_per_token:
            *rows, of_rows = comm.dispatch_again([*payloads, topk_weights], handle, launch=launch)
            return tuple(rows), of_rows
        arrived = comm.dispatch_again(payloads, handle, launch=launch)
        return arrived, comm.dispatch_again(topk_weights, handle, launch=launch)[0]

    def combine(
        self, parts: Sequence[torch.Tensor], launch: Launch | None = None, weights: Literal["topk"] | None = None
    ) -> tuple[torch.Tensor, ...]:
        """Add up the rows of each token in each of several tensors: (num_tokens, hidden); one may have ``weights``."""
        comm = self.comms.turn_to(self.comm, "combine")
        if len(parts) == 1:  # which costs less from the second call on
            return (comm.combine(parts[0], self.handle, weights=weights, launch=launch),)
        return comm.combine_all(parts, self.handle, launch=launch)
