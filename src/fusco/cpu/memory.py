"""Views of the CPU backend's data in the shared segments of a node: routing, pools of rows, and rings."""

from __future__ import annotations

import torch

from fusco.control.flags import Flags
from fusco.control.node_memory import NodeMemory
from fusco.cpu.layout import CpuLayout


class CpuMemory:
    """Typed views of the data sections of all ranks of a node, by local rank."""

    def __init__(self, control: NodeMemory, layout: CpuLayout) -> None:
        """Map the segments of ``control``, which must be closed after this object."""
        self.control, self.layout = control, layout
        self.rank, self.node, self.local, self.ranks = control.rank, control.node, control.local, control.ranks
        self.bytes, self.flags = list(control.bytes), list(control.flags)

    @property
    def own(self) -> Flags:
        """Flags that this rank may write."""
        return self.flags[self.local]

    def counterpart(self, node: int) -> int:
        return self.control.counterpart(node)

    def ids(self, local: int, node: int, num_tokens: int, num_topk: int) -> torch.Tensor:
        """Return the expert ids of tokens from ``node`` that a local rank published, int32 (num_tokens, num_topk)."""
        offset = self.layout.ids_offset(self._region(node))
        return self._view(local, offset, (num_tokens, num_topk), torch.int32)

    def weights(self, local: int, node: int, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        """Return their weights, (num_tokens, num_topk)."""
        return self._view(local, self.layout.weights_offset(self._region(node)), shape, dtype)

    def pool_offset(self, node: int) -> int:
        """Return the offset of rows from ``node`` in a pool of this node, in bytes of the segment."""
        return self.layout.pool_offset(self._region(node))

    def pool(self, local: int, node: int, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        """Return the rows from ``node`` in the pool of a local rank."""
        return self._view(local, self.pool_offset(node), shape, dtype)

    def ring_slot(self, producer: int, consumer: int, slot: int) -> torch.Tensor:
        """Return a slot of the ring between two local ranks, uint8 (slot_bytes,)."""
        offset = self.layout.ring_offset(consumer, slot)
        return self.bytes[producer][offset : offset + self.layout.slot_bytes]

    def close(self) -> None:
        """Drop all views of the segments."""
        self.bytes, self.flags = [], []

    def _region(self, node: int) -> int:
        return self.layout.region_of(self.node, node)

    def _view(self, local: int, offset: int, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        num_bytes = shape[0] * shape[1] * dtype.itemsize
        return self.bytes[local][offset : offset + num_bytes].view(dtype).view(shape)
