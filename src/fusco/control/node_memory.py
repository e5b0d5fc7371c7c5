"""What one rank sees of its node: its own segment and those of its peers, laid out alike."""

from __future__ import annotations

import torch

from fusco.control.flags import Flags
from fusco.control.layout import ControlLayout
from fusco.control.shared_segment import SharedSegment


class NodeMemory:
    """The segments of all ranks of a node, by local rank, with typed views of flags and records."""

    def __init__(self, layout: ControlLayout, rank: int, segments: list[SharedSegment]) -> None:
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

    def close(self) -> None:
        """Let go of all segments."""
        self.bytes, self.flags = [], []
        self._records.clear()
        while self._segments:
            self._segments.pop().close()
