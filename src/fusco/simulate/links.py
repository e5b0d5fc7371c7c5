"""Links of a cluster, one capacity each, and the routes of flows over them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from fusco.core.lanes import IntArray
from fusco.core.topology import Topology
from fusco.simulate.cluster import Cluster

BYTES_PER_US_AND_GBS = 1000.0
LinkKind = Literal[
    "nvl-out", "nvl-in", "nic-out", "nic-in", "memory", "pair", "rail-up", "rail-down", "leaf-up", "leaf-down", "cores"
]


class Link(NamedTuple):
    """A link: its kind and what it belongs to: a rank, a node (its leaf's first), or the local rank of a rail."""

    kind: LinkKind
    rank: int | None
    node: int | None
    name: str


@dataclass(frozen=True, eq=False)
class LinkTable:
    """All links of a cluster by number: a block of each kind.

    A flow within a node uses ``nvl-out`` of its source and ``nvl-in`` of its destination, and their ``pair`` where
    pairs are limited. A flow between nodes uses ``nic-out`` and ``nic-in``, and what is between; if another rank's NIC
    sends it, also the links within the node to that rank. A pass over memory uses ``memory``, all else that cores do
    for a row ``cores`` of the machine.
    """

    cluster: Cluster

    @cached_property
    def topology(self) -> Topology:
        """Nodes and ranks."""
        return self.cluster.topology

    @cached_property
    def _blocks(self) -> dict[LinkKind, tuple[int, npt.NDArray[np.float64]]]:
        """First number and capacities, in bytes per us, of the links of each kind."""
        of, num_ranks, local = self.cluster, self.topology.world_size, self.topology.ranks_per_node
        nic = self.nic_gbs
        blocks: dict[LinkKind, npt.NDArray[np.float64]] = {
            "nvl-out": np.full(num_ranks, of.nvl_gbs),
            "nvl-in": np.full(num_ranks, of.nvl_gbs),
            "nic-out": nic,
            "nic-in": nic,
            "memory": np.full(num_ranks, of.memory_gbs),
            "pair": np.full(num_ranks * local if of.pair_gbs else 0, of.pair_gbs),
        }
        blocks["cores"] = np.full((of.machines or of.nodes) if of.core_gbs else 0, of.core_gbs)
        fabric = of.fabric
        by_local, by_node = nic.reshape(-1, local).sum(axis=0), nic.reshape(-1, local).sum(axis=1)
        if fabric.kind == "rails" and np.isfinite(fabric.oversubscription):
            blocks["rail-up"] = blocks["rail-down"] = by_local / fabric.oversubscription
        if fabric.kind == "leaves":
            of_leaf = np.add.reduceat(by_node, np.arange(0, len(by_node), fabric.nodes_per_leaf))
            blocks["leaf-up"] = blocks["leaf-down"] = of_leaf / fabric.oversubscription
        first = np.append(0, np.cumsum([len(each) for each in blocks.values()]))
        scaled = {kind: each * BYTES_PER_US_AND_GBS for kind, each in blocks.items()}
        return {kind: (int(first[i]), each) for i, (kind, each) in enumerate(scaled.items())}

    @cached_property
    def nic_gbs(self) -> npt.NDArray[np.float64]:
        """Rate of each rank's NIC, GB/s; the mean of a node is ``nic_gbs`` of the cluster."""
        shares = np.array(self.cluster.nic_shares or (1,) * self.cluster.ranks_per_node, np.float64)
        return np.tile(shares / shares.mean() * self.cluster.nic_gbs, self.cluster.nodes)

    @cached_property
    def capacity(self) -> npt.NDArray[np.float64]:
        """Capacity of each link, bytes per us, float64 (L,)."""
        return np.concatenate([capacities for _, capacities in self._blocks.values()])

    def first_of(self, kind: str) -> int:
        """Return the number of the first link of a kind."""
        return self._blocks[kind][0]  # type: ignore[index]

    def slice_of(self, kind: LinkKind) -> slice:
        """Return the numbers of the links of a kind."""
        first, capacities = self._blocks[kind]
        return slice(first, first + len(capacities))

    def link(self, number: int) -> Link:
        """Return what a number means."""
        kind, first = next(
            (kind, first) for kind, (first, rates) in self._blocks.items() if number < first + len(rates)
        )
        at, local = number - first, self.topology.ranks_per_node
        if kind == "pair":
            src, to = divmod(at, local)
            node = self.topology.rank_to_node[src]
            return Link(kind, src, node, f"{kind} of ranks {src} and {self.topology.node_to_ranks[node][to]}")
        if kind == "cores":
            return Link(kind, None, None, f"{kind} of machine {at}")
        if kind.startswith("rail"):
            return Link(kind, None, None, f"{kind} of rail {at}")
        if kind.startswith("leaf"):
            return Link(kind, None, at * self.cluster.fabric.nodes_per_leaf, f"{kind} of leaf {at}")
        return Link(kind, at, self.topology.rank_to_node[at], f"{kind} of rank {at}")

    def routes(
        self, kind: str, src: IntArray, dst: IntArray, via: IntArray | None = None, until: IntArray | None = None
    ) -> IntArray:
        """Return the links of each flow, int64 (F, W), padded with -1; see ``Hop`` for the kinds."""
        return np.stack(self.columns(kind, src, dst, via, until), axis=1)

    def columns(
        self, kind: str, src: IntArray, dst: IntArray, via: IntArray | None = None, until: IntArray | None = None
    ) -> list[IntArray]:
        """Return the columns of ``routes``."""
        none = np.full(len(src), -1)
        if kind == "memory":
            return [self.first_of("memory") + src]
        if kind == "cores":
            of = self.cluster
            machine: IntArray = np.array(self.topology.rank_to_node)[src] * (of.machines or of.nodes) // of.nodes
            return [self.first_of("cores") + machine]
        if kind == "within":
            return self._within(src, dst)
        receiver = dst if until is None else until
        sender = self._relayed(src if via is None else via, receiver)
        columns = [self.first_of("nic-out") + sender, self.first_of("nic-in") + receiver]
        if sender is not src:
            columns += [np.where(sender == src, none, column) for column in self._within(src, sender)]
        if receiver is not dst:
            columns += [np.where(receiver == dst, none, column) for column in self._within(receiver, dst)]
        node, local = np.array(self.topology.rank_to_node), np.array(self.topology.rank_to_local)
        if "rail-up" in self._blocks:
            same = local[sender] == local[receiver]
            columns += [
                np.where(same, none, self.first_of(each) + local[end])
                for each, end in (("rail-up", sender), ("rail-down", receiver))
            ]
        if "leaf-up" in self._blocks:
            leaf = node // self.cluster.fabric.nodes_per_leaf
            same = leaf[sender] == leaf[receiver]
            columns += [
                np.where(same, none, self.first_of(each) + leaf[end])
                for each, end in (("leaf-up", sender), ("leaf-down", receiver))
            ]
        return columns

    def _within(self, src: IntArray, dst: IntArray) -> list[IntArray]:
        links = [self.first_of("nvl-out") + src, self.first_of("nvl-in") + dst]
        if self.cluster.pair_gbs:
            local = np.array(self.topology.rank_to_local)
            links.append(self.first_of("pair") + src * self.topology.ranks_per_node + local[dst])
        return links

    def _relayed(self, src: IntArray, dst: IntArray) -> IntArray:
        """Return the ranks that send: where rails are not connected, those of the receivers' rails."""
        fabric = self.cluster.fabric
        if fabric.kind != "rails" or np.isfinite(fabric.oversubscription):
            return src
        return counterpart(self.topology, src, dst)


def counterpart(topology: Topology, src: IntArray, dst: IntArray) -> IntArray:
    """Return the rank on the node of each ``src`` with the local rank of ``dst``: whose NIC NCCL's PXN takes."""
    node, local = np.array(topology.rank_to_node), np.array(topology.rank_to_local)
    return np.array(topology.node_to_ranks)[node[src], local[dst]]
