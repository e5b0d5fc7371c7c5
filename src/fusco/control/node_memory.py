"""Shared segments of the ranks of one node, all with the same layout, and waits for their flags."""

from __future__ import annotations

from collections.abc import Callable

import torch

from fusco.control.flags import Flags
from fusco.control.layout import ControlLayout
from fusco.control.shared_segment import SharedSegment
from fusco.control.watchdog import Watchdog
from fusco.core.errors import Stall


class NodeMemory:
    """The segments of all ranks of a node, by local rank, with typed views of flags and records."""

    def __init__(self, layout: ControlLayout, rank: int, segments: list[SharedSegment]) -> None:
        self.layout = layout
        self.rank = rank
        self.node = layout.topology.rank_to_node[rank]
        self.local = layout.topology.rank_to_local[rank]
        self._segments = segments
        self.bytes = [segment.memory for segment in segments]
        # Made in advance: a rank that cannot use PyTorch where it is must still publish a record with its rejection.
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
        """The rank with the same local rank on ``node``; the two exchange records and routing."""
        return self.layout.topology.node_to_ranks[node][self.local]

    def record(self, local: int, node: int) -> torch.Tensor:
        """The record from ``node`` in the segment of a local rank, uint8 (record_bytes,)."""
        offset = self.layout.record_offset(node)
        return self.bytes[local][offset : offset + self.layout.record_bytes]

    def record_bytes(self, local: int, node: int) -> memoryview:
        """The same record as a memoryview, which is faster to read and write than a tensor."""
        return self._records[local, node]

    def close(self) -> None:
        """Close all segments."""
        self.bytes, self.flags = [], []
        self._records.clear()
        while self._segments:
            self._segments.pop().close()


def wait_for_flag(
    memory: NodeMemory,
    watchdog: Watchdog,
    flag: int,
    value: int,
    phase: str,
    expected: str,
    node: int | None = None,
    poll: Callable[[], object] = lambda: None,
) -> None:
    """Wait until the flag of every rank of this node is at least ``value``.

    Args:
        memory: of this node.
        watchdog: limits the wait.
        flag: index of the flag.
        value: to wait for.
        phase: the step, as an error names it.
        expected: what the flag announces, as an error names it.
        node: where that comes from: the ranks' counterparts on this node. ``None`` means the ranks themselves.
        poll: called before every check; moves what other ranks wait for.

    Raises:
        PeerFailureError: see ``Watchdog``.

    """
    topology = memory.layout.topology

    def source(local: int) -> int:
        is_remote = node not in (None, memory.node)
        return topology.node_to_ranks[node if is_remote and node is not None else memory.node][local]

    def missing() -> list[int]:
        return [local for local, flags in enumerate(memory.flags) if flags.load(flag) < value]

    def is_ready() -> bool:
        poll()
        return not missing()

    def stall() -> Stall:
        waiting = missing()
        # This rank waits for the source, and for the rank of this node that passes the data on.
        ranks = dict.fromkeys([source(local) for local in waiting] + [memory.ranks[local] for local in waiting])
        ranks.pop(memory.rank, None)
        sources = [source(local) for local in waiting]
        return Stall(phase, tuple(ranks), f"{expected} from each of {len(memory.flags)} ranks", f"none from {sources}")

    watchdog.wait_until(is_ready, stall)
