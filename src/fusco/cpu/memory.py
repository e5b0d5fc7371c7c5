"""Views of the CPU backend's data in the shared segments of a node: routing, pools of rows, and rings."""

from __future__ import annotations

import numpy as np
import torch

from fusco.control.flags import Flags
from fusco.control.node_memory import NodeMemory
from fusco.cpu.kernels.sum_rows import Rings
from fusco.cpu.layout import CpuLayout


class CpuMemory:
    """Typed views of the data sections of all ranks of a node, by local rank."""

    def __init__(self, control: NodeMemory, layout: CpuLayout) -> None:
        """Map the segments of ``control``, which must be closed after this object."""
        self.control, self.layout = control, layout
        self.rank, self.node, self.local, self.ranks = control.rank, control.node, control.local, control.ranks
        self.bytes, self.flags = list(control.bytes), list(control.flags)
        self.addresses = [memory.data_ptr() for memory in self.bytes]
        topology = layout.topology
        self.nodes, self.locals = np.array(topology.rank_to_node), np.array(topology.rank_to_local)  # by rank
        # By local rank: addresses of its rows, of rows that cross between nodes, and of the flags that announce these.
        # A rank's rows and routing are there when its record is.
        self.pools = np.array([base + layout.pool_offset for base in self.addresses])
        self.crossing_pools = np.array([base + layout.crossing_offset for base in self.addresses])
        self.rows_flags = np.array([base + 8 * layout.control.record_flag(self.node) for base in self.addresses])
        arrival_flags = [layout.arrival_flag(rank) for rank in range(topology.world_size)]
        self.arrival_flags = np.array([[base + 8 * flag for flag in arrival_flags] for base in self.addresses])
        # Addresses of the ids and weights of each rank's tokens on this node: its counterpart here receives them.
        where = [(self.addresses[local], node) for local, node in zip(self.locals, self.nodes, strict=True)]
        self.src_to_ids = np.array([base + layout.ids_offset(self._region(node)) for base, node in where])
        self.src_to_weights = np.array([base + layout.weights_offset(self._region(node)) for base, node in where])
        self.are_remote = self.nodes != self.node
        # Addresses of what each rank of another node attached to its record.
        self.src_to_attachment = np.array([base + layout.control.attachment_offset(node) for base, node in where])
        remotes = topology.remote_nodes(self.rank)
        self.attachments = self.src_to_attachment[[control.counterpart(node) for node in remotes]].tolist()
        # In a small combine each local rank holds the rows of these ranks, in this order: its counterparts and itself.
        nodes_in_order = [*remotes, self.node]
        self.sources = np.array(
            [[topology.node_to_ranks[node][local] for node in nodes_in_order] for local in range(len(self.ranks))]
        )
        outgoing = [self._ring(self.local, consumer) for consumer in range(len(self.ranks))]
        incoming = [self._ring(producer, self.local) for producer in range(len(self.ranks))]
        depth, slot_bytes = layout.settings.ring_depth, layout.slot_bytes
        self.rings_out = Rings(np.array(outgoing, np.int64), depth, slot_bytes)
        self.rings_in = Rings(np.array(incoming, np.int64), depth, slot_bytes)
        # Partial sums of a small combine are in the rings, which nothing else uses then: addresses of those for each
        # local rank, and from each.
        self.sums_out, self.sums_in = self.rings_out.addresses[:, 2].copy(), self.rings_in.addresses[:, 2].copy()

    @property
    def own(self) -> Flags:
        """Flags that this rank may write."""
        return self.flags[self.local]

    def ids(self, local: int, node: int, num_tokens: int, num_topk: int) -> torch.Tensor:
        """Return the expert ids of tokens from ``node`` that a local rank published, int32 (num_tokens, num_topk)."""
        offset = self.layout.ids_offset(self._region(node))
        return self._view(local, offset, (num_tokens, num_topk), torch.int32)

    def weights(self, local: int, node: int, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        """Return their weights, (num_tokens, num_topk)."""
        return self._view(local, self.layout.weights_offset(self._region(node)), shape, dtype)

    def own_rows(self, shape: tuple[int, int]) -> torch.Tensor:
        """Return this rank's rows in its pool, as bytes."""
        return self._view(self.local, self.layout.pool_offset, shape, torch.uint8)

    def crossing_rows(self, local: int, first: int, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        """Return rows from place ``first`` on of those that cross between nodes in the pool of a local rank."""
        return self._view(local, self.layout.crossing_offset + first * shape[1] * dtype.itemsize, shape, dtype)

    def ring_slot(self, producer: int, consumer: int, slot: int) -> torch.Tensor:
        """Return a slot of the ring between two local ranks, uint8 (slot_bytes,)."""
        offset = self.layout.ring_offset(consumer, slot)
        return self.bytes[producer][offset : offset + self.layout.slot_bytes]

    def _ring(self, producer: int, consumer: int) -> tuple[int, int, int]:
        """Return the addresses of the counts of messages put in and taken out, and of slot 0."""
        control = self.layout.control
        return (
            self.addresses[producer] + 8 * control.produced_flag(consumer),
            self.addresses[consumer] + 8 * control.consumed_flag(producer),
            self.addresses[producer] + self.layout.ring_offset(consumer, 0),
        )

    def close(self) -> None:
        """Drop all views of the segments."""
        self.bytes, self.flags = [], []

    def _region(self, node: int) -> int:
        return self.layout.region_of(self.node, node)

    def _view(self, local: int, offset: int, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        num_bytes = shape[0] * shape[1] * dtype.itemsize
        return self.bytes[local][offset : offset + num_bytes].view(dtype).view(shape)
