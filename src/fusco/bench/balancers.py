"""Imbalance that balancers leave of loads, bimodal (FUSCO's Fig. 10) or of prefill batches, and the time they take."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fusco.bench.explain import balance_of
from fusco.bench.inputs.prompts import prompts_of_ranks
from fusco.bench.inputs.traffic import Trace
from fusco.bench.names import Loads, Prefill
from fusco.core.lanes import IntArray
from fusco.core.placement import ExpertPlacement
from fusco.core.topology import Topology
from fusco.planner.balancer import BALANCERS
from fusco.planner.traffic import Traffic

_BIMODAL = 0.2
_ROWS_AT_FULL_LOAD = 1 << 20  # fine enough that rounding to whole rows does not show
_NUM_EXPERTS, _NUM_LAYERS = 128, 48  # of Qwen3-30B-A3B, whose routing comes with fusco
_MAX_TOKENS = 8192


@dataclass(frozen=True)
class BalancerRecord:
    """Medians over draws. The time includes the call from Python.

    Ratios are the busiest rank's rows over the bound, so 1.0 is perfect: what it sends, what it receives, the larger of
    both. ``moved_share`` are the rows that lanes move within nodes, of all. Gains are the busiest rank's rows by
    ``send-and-receive`` over those by this balancer, in the same draw: the median and the 99th percentile.
    """

    loads: str
    balancer: str
    nodes: int
    ranks_per_node: int
    send_ratio: float
    receive_ratio: float
    busiest_ratio: float
    moved_share: float
    microseconds: float
    gain: float
    gain_p99: float


def compare_balancers(
    shapes: Sequence[tuple[int, int]], num_draws: int, seed: int, loads: Loads
) -> list[BalancerRecord]:
    """Run every balancer on the same draws, for each of ``shapes``: pairs of nodes and ranks per node."""
    records = []
    for shape in shapes:
        topology = Topology.of_equal_nodes(shape[0] * shape[1], shape[1])
        if loads == "bimodal":
            traffics = _bimodal(topology, num_draws, seed)
        else:
            traffics = _prefills(topology, num_draws, seed, loads)
        before = _measure("send-and-receive", traffics)[:, 2]
        for name in BALANCERS:
            measured = _measure(name, traffics)
            gains = before / measured[:, 2]
            figures = (*np.median(measured, axis=0), np.median(gains), np.quantile(gains, 0.99))
            records.append(BalancerRecord(loads, name, *shape, *(round(float(m), 3) for m in figures)))
    return records


def _measure(name: str, traffics: Sequence[Traffic]) -> npt.NDArray[np.float64]:
    """Return the figures of each draw, (num_draws, 5): those of ``BalancerRecord`` from ``send_ratio`` on."""
    balance = BALANCERS[name]
    balance(traffics[0])  # compiles it, if it is compiled
    measured = []
    for traffic in traffics:
        start = time.perf_counter()
        chosen = balance(traffic)
        seconds = time.perf_counter() - start
        lanes = traffic.lanes_of(chosen)
        left = balance_of(traffic, lanes)
        ratios = (left.send_ratio, left.receive_ratio, max(left.send_ratio, left.receive_ratio))
        measured.append((*ratios, lanes.num_moved / max(1, traffic.num_rows.sum()), seconds * 1e6))
    return np.array(measured)


def _bimodal(topology: Topology, num_draws: int, seed: int) -> list[Traffic]:
    draws = np.random.default_rng(seed).beta(_BIMODAL, _BIMODAL, (num_draws, topology.world_size))
    rows = np.rint(draws * _ROWS_AT_FULL_LOAD).astype(np.int64)
    return [Traffic.from_counts(topology, np.repeat(of[:, None], topology.num_nodes, 1).tolist()) for of in rows]


def _prefills(topology: Topology, num_draws: int, seed: int, loads: Prefill) -> list[Traffic]:
    """Return the traffic of prefill batches: prompts of the Azure trace as they arrive, a layer of Qwen3."""
    placement = ExpertPlacement.contiguous(_NUM_EXPERTS, topology.world_size)
    nodes = np.array(topology.rank_to_node)[np.array(placement.expert_to_rank)]
    layers = [_rows_before(nodes[Trace.load(None, None, i).topk_idx], topology.num_nodes) for i in range(_NUM_LAYERS)]
    prompts = prompts_of_ranks(loads, _MAX_TOKENS, num_draws * topology.world_size)
    random, traffics = np.random.default_rng(seed), []
    for draw in range(num_draws):
        counts, before = [], layers[draw % _NUM_LAYERS]
        for rank in range(topology.world_size):
            num_tokens = sum(prompts[draw * topology.world_size + rank])
            first = int(random.integers(len(before) - 1))
            whole, rest = divmod(first + num_tokens, len(before) - 1)
            counts.append((whole * before[-1] + before[rest] - before[first]).tolist())
        traffics.append(Traffic.from_counts(topology, counts))
    return traffics


def _rows_before(token_to_nodes: IntArray, num_nodes: int) -> IntArray:
    """Return how many of the tokens before each need each node, int64 (num_tokens + 1, num_nodes)."""
    marks = (token_to_nodes[:, :, None] == np.arange(num_nodes)).any(axis=1)
    return np.concatenate((np.zeros((1, num_nodes), np.int64), marks.cumsum(axis=0)))
