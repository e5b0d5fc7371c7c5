"""What one rank sees of its node: its own segment and those of its peers, laid out alike."""

from __future__ import annotations

import torch

from fusco.control.flags import Flags
from fusco.control.layout import ArenaLayout
from fusco.control.shared_segment import SharedSegment


class NodeMemory:
    """The segments of all ranks of a node, by local rank, and typed views of their sections."""

    def __init__(self, layout: ArenaLayout, rank: int, segments: list[SharedSegment]) -> None:
        self.layout = layout
        self.rank = rank
        self.node = layout.topology.rank_to_node[rank]
        self.local = layout.topology.rank_to_local[rank]
        self._segments = segments
        self.bytes = [segment.memory for segment in segments]
        # Made beforehand: ranks tell each other by records, too, that one of them cannot use PyTorch where it is.
        self._records: dict[tuple[int, int], memoryview] = {
            (local, node): self.record(local, node).numpy().data
            for local in range(len(segments))
            for node in range(layout.topology.num_nodes)
        }
        self.flags = [Flags(memory[: layout.flags_bytes]) for memory in self.bytes]

    @property
    def own(self) -> Flags:
        """The flags that this rank may write."""
        return self.flags[self.local]

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of this node, by local rank."""
        return self.layout.topology.node_to_ranks[self.node]

    def counterpart(self, node: int) -> int:
        """The rank of the same local rank on another node: its partner in exchanging records and routing."""
        return self.layout.topology.node_to_ranks[node][self.local]

    def record(self, local: int, node: int) -> torch.Tensor:
        """The record from ``node`` on the board of a local rank, uint8."""
        offset = self.layout.record_offset(node)
        return self.bytes[local][offset : offset + self.layout.record_bytes]

    def record_bytes(self, local: int, node: int) -> memoryview:
        """The same as plain bytes, which are quicker to read and write than a tensor."""
        return self._records[local, node]

    def ids(self, local: int, node: int, num_tokens: int, num_topk: int) -> torch.Tensor:
        """Expert ids of tokens from ``node`` that a local rank published, int32 (num_tokens, num_topk)."""
        offset = self.layout.ids_offset(self._region(node))
        return self._view(local, offset, (num_tokens, num_topk), torch.int32)

    def weights(self, local: int, node: int, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        """Their weights, (num_tokens, num_topk)."""
        return self._view(local, self.layout.weights_offset(self._region(node)), shape, dtype)

    def pool_offset(self, node: int) -> int:
        """Where rows from ``node`` stand in a pool of this node, in bytes of the segment."""
        return self.layout.pool_offset(self._region(node))

    def pool(self, local: int, node: int, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        """Rows from ``node`` in the pool of a local rank."""
        return self._view(local, self.pool_offset(node), shape, dtype)

    def ring_slot(self, producer: int, consumer: int, slot: int) -> torch.Tensor:
        """A slot of the ring between two local ranks, uint8 (slot_bytes,)."""
        offset = self.layout.ring_offset(consumer, slot)
        return self.bytes[producer][offset : offset + self.layout.slot_bytes]

    def close(self) -> None:
        """Let go of all segments."""
        self.bytes, self.flags = [], []
        self._records.clear()
        while self._segments:
            self._segments.pop().close()

    def _region(self, node: int) -> int:
        return self.layout.region_of(self.node, node)

    def _view(self, local: int, offset: int, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        num_bytes = shape[0] * shape[1] * dtype.itemsize
        return self.bytes[local][offset : offset + num_bytes].view(dtype).view(shape)
