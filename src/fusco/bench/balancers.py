"""Imbalance that balancers leave of bimodal loads (FUSCO's Fig. 10), and the time they take."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fusco.bench.explain import balance_of
from fusco.core.topology import Topology
from fusco.planner.balancer import BALANCERS
from fusco.planner.traffic import Traffic

_BIMODAL = 0.2
_ROWS_AT_FULL_LOAD = 1 << 20  # fine enough that rounding to whole rows does not show


@dataclass(frozen=True)
class BalancerRecord:
    """Medians over draws. The time includes the call from Python.

    Ratios are the busiest rank's rows over the bound, so 1.0 is perfect: what it sends, what it receives, the larger of
    both. ``moved_share`` are the rows that lanes move within nodes, of all.
    """

    balancer: str
    nodes: int
    ranks_per_node: int
    send_ratio: float
    receive_ratio: float
    busiest_ratio: float
    moved_share: float
    microseconds: float


def compare_balancers(shapes: Sequence[tuple[int, int]], num_draws: int, seed: int = 0) -> list[BalancerRecord]:
    """Run every balancer on the same draws.

    Args:
        shapes: pairs of nodes and ranks per node.
        num_draws: draws for each shape; in each, a rank's load is drawn from Beta(0.2, 0.2) and spread evenly over the
            other nodes.
        seed: of the draws.
    """
    records = []
    for num_nodes, ranks_per_node in shapes:
        topology = Topology.of_equal_nodes(num_nodes * ranks_per_node, ranks_per_node)
        draws = np.random.default_rng(seed).beta(_BIMODAL, _BIMODAL, (num_draws, topology.world_size))
        traffics = [
            Traffic.from_counts(topology, np.repeat(np.rint(draw * _ROWS_AT_FULL_LOAD)[:, None], num_nodes, 1).tolist())
            for draw in draws
        ]
        for name, balance in BALANCERS.items():
            balance(traffics[0])  # compiles it, if it is compiled
            measured = []
            for traffic in traffics:
                start = time.perf_counter()
                chosen = balance(traffic)
                seconds = time.perf_counter() - start
                lanes = traffic.lanes_of(chosen)
                left = balance_of(traffic, lanes)
                moved_share = lanes.num_moved / traffic.num_rows.sum()
                ratios = (left.send_ratio, left.receive_ratio, max(left.send_ratio, left.receive_ratio))
                measured.append((*ratios, moved_share, seconds * 1e6))
            medians = np.median(measured, axis=0)
            records.append(BalancerRecord(name, num_nodes, ranks_per_node, *(round(float(m), 3) for m in medians)))
    return records
