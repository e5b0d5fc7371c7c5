"""Balancer that moves what it can: every source's rows are cut and sent by other ranks, to any."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fusco import Lanes, Traffic


@dataclass(frozen=True)
class ScatteredLanes:
    """Random lanes that depend on the traffic alone; no rank carries its rows if its node has another one.

    ``max_rows`` limits what a rank sends or receives.
    """

    max_rows: int

    def __call__(self, traffic: Traffic) -> Lanes:
        random = np.random.default_rng([int(n) for n in traffic.num_rows.ravel()])
        for num_pieces in (4, 3, 2, 1):
            lanes = self._draw(traffic, random, num_pieces)
            if max(lanes.sent_rows.max(), lanes.received_rows.max()) <= self.max_rows:
                return lanes
        return self._draw(traffic, random, 0)

    def _draw(self, traffic: Traffic, random: np.random.Generator, num_pieces: int) -> Lanes:
        """Cut at random; without pieces, shift by one rank, which no limit forbids."""
        topology, runs = traffic.topology, []
        for (node, local, dst), num_rows in np.ndenumerate(traffic.num_rows):
            cuts = sorted(random.integers(0, num_rows + 1, max(0, num_pieces - 1)).tolist())
            for first, end in zip([0, *cuts], [*cuts, int(num_rows)], strict=True):
                shift = random.integers(1, max(2, topology.ranks_per_node)) if num_pieces else 1
                carrier = (local + shift) % topology.ranks_per_node
                forwarder = random.integers(topology.ranks_per_node) if num_pieces else carrier
                here, there = topology.node_to_ranks[node], topology.node_to_ranks[dst]
                runs.append((here[local], dst, first, end, here[carrier], there[forwarder]))
        return Lanes.of_runs(topology, runs)
