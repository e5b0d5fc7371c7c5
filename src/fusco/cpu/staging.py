"""The memories of a rank in an all-to-all, and how far their regions are filled."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fusco.engine.all_to_all import FlowSlice


class Staging:
    """Reads messages from memories and writes them there; what waits in between is there once its region is filled."""

    def __init__(self, memories: Sequence[torch.Tensor], num_regions: int) -> None:
        """``memories`` are uint8, in the order of ``fusco.schedule.rank_schedule``."""
        self._tensors = list(memories)
        self._arrays = [memory.numpy() for memory in memories]
        self._filled = [0] * num_regions

    def is_there(self, message: FlowSlice) -> bool:
        """Whether everything that the message shall be read from is there."""
        return all(region < 0 or self._filled[region] >= offset + size for _, offset, size, region in message.spans)

    def in_place(self, message: FlowSlice) -> torch.Tensor | None:
        """The memory of a message that stands, or shall stand, in one piece; else ``None``."""
        if len(message.spans) > 1:
            return None
        memory, offset, size, _ = message.spans[0]
        return self._tensors[memory][offset : offset + size]

    def gather(self, message: FlowSlice, slot: torch.Tensor) -> None:
        """Read a message into the first bytes of a slot."""
        target, begin = slot.numpy(), 0
        for memory, offset, size, _ in message.spans:
            target[begin : begin + size] = self._arrays[memory][offset : offset + size]
            begin += size

    def scatter(self, slot: torch.Tensor, message: FlowSlice) -> None:
        """Write a message from the first bytes of a slot to its places; ``note`` it then."""
        source, begin = slot.numpy(), 0
        for memory, offset, size, _ in message.spans:
            self._arrays[memory][offset : offset + size] = source[begin : begin + size]
            begin += size

    def note(self, message: FlowSlice) -> None:
        """A message stands in its places now."""
        for _, offset, size, region in message.spans:
            if region >= 0:
                self._filled[region] = offset + size
