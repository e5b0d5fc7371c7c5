"""Tensors that depend on nothing that a later call changes: made by the first that needs one, and kept."""

from __future__ import annotations

from collections.abc import Callable

import torch

from fusco.core.current_stream import capture_number, raw_stream_of


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
