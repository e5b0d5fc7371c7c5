"""Schedules of matrices in every mode: number and length of stages, modelled times, the time it takes to find them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from fusco.bench.harness.environment import Measurement
from fusco.bench.inputs.matrices import make_matrix
from fusco.core.lanes import IntArray
from fusco.schedule import Links, Stages, choose_mode, decompose, lower_bound_bytes, spread_out, stages_us, warm_up

# FAST's published C++ (github.com/MangoBoost/FAST), its decomposition alone, in us by number of nodes: measured on a
# machine of the kind of docs/performance/schedule.md, on matrices like those here. The paper (section 4.4), with
# scheduling within nodes of 8 GPUs, on a Xeon 8468: 25, 221, 805 and 77,000 us for 4, 8, 12 and 40 nodes.
FAST_US = {4: 3.4, 8: 50.0, 12: 330.0, 16: 1242.0, 24: 6685.0, 40: 56_000.0}

NUM_NODES = (2, 4, 8, 12, 16, 24, 32, 40, 64, 128)

MODES: dict[str, Callable[[IntArray], Stages]] = {
    "exact": decompose,
    "few": partial(decompose, mode="few"),
    "spread-out": spread_out,
}


@dataclass(frozen=True, kw_only=True)
class ScheduleRecord(Measurement):
    """One mode at one number of nodes.

    Over all draws: median and maximum number of stages; mean and maximum length over lower bound; median time in us,
    one call from Python each. ``fast_us`` is FAST's published figure, or None.
    """

    mode: str
    num_nodes: int
    num_draws: int
    seed: int
    num_stages: float
    most_stages: int
    mean_ratio: float
    largest_ratio: float
    microseconds: float
    fast_us: float | None


def measure_schedules(num_nodes: Sequence[int], num_draws: int, seed: int) -> Iterator[ScheduleRecord]:
    """Run every mode on the same draws: off-diagonal entries uniform in 1..100,000.

    Every schedule is verified: it sends the bytes of the matrix and is as short as its mode promises; otherwise
    ``RuntimeError``.
    """
    warm_up()
    for size in num_nodes:
        for mode in MODES:
            yield _measure(mode, size, num_draws, seed)


def _measure(mode: str, num_nodes: int, num_draws: int, seed: int) -> ScheduleRecord:
    schedule = MODES[mode]
    matrices = [make_matrix("random", num_nodes, seed=seed * num_draws + draw) for draw in range(num_draws)]
    schedule(matrices[0])
    microseconds, num_stages, ratios = [], [], []
    for matrix in matrices:
        start = time.perf_counter()
        stages = schedule(matrix)
        microseconds.append((time.perf_counter() - start) * 1e6)
        num_stages.append(stages.num_stages)
        ratios.append(_verified_ratio(mode, matrix, stages))
    return ScheduleRecord(
        mode=mode,
        num_nodes=num_nodes,
        num_draws=num_draws,
        seed=seed,
        num_stages=float(np.median(num_stages)),
        most_stages=max(num_stages),
        mean_ratio=round(float(np.mean(ratios)), 4),
        largest_ratio=round(max(ratios), 4),
        microseconds=round(float(np.median(microseconds)), 2),
        fast_us=FAST_US.get(num_nodes),
    )


def _verified_ratio(mode: str, matrix: IntArray, stages: Stages) -> float:
    bound, total = lower_bound_bytes(matrix), stages.total_bytes
    longest = {"exact": bound, "few": bound + bound // 50}.get(mode, total)
    if not np.array_equal(stages.node_bytes(), matrix) or not bound <= total <= longest:
        raise RuntimeError(f"mode {mode!r} schedules {len(matrix)} nodes wrongly: {total} bytes of stages for {bound}")
    return total / bound if bound else 1.0


@dataclass(frozen=True, kw_only=True)
class ModeRecord:
    """The schedule of a matrix in one mode. Bytes are those of a node; ``ratio`` is length over lower bound.

    ``modelled_us`` is the time of the stages by the links given; ``dst_node``, ``num_bytes`` and ``duration_bytes`` are
    those of ``Stages``.
    """

    matrix: str
    num_nodes: int
    ranks_per_node: int
    latency_us: float
    internode_gbs: float
    mode: str
    is_chosen: bool
    lower_bound_bytes: int
    total_bytes: int
    ratio: float
    num_stages: int
    modelled_us: float
    dst_node: list[list[int]]
    num_bytes: list[list[int]]
    duration_bytes: list[int]


def compare_modes(matrix: IntArray, name: str, ranks_per_node: int, links: Links) -> list[ModeRecord]:
    """Return a record for every mode; the one that ``choose_mode`` chooses is marked.

    Stages are as they are executed: those of ``decompose`` in ascending order of length.
    """
    bound, chosen = lower_bound_bytes(matrix), choose_mode(matrix, ranks_per_node, links)
    mode_to_stages = {mode: schedule(matrix) for mode, schedule in MODES.items()}
    mode_to_stages |= {mode: mode_to_stages[mode].shortest_first() for mode in ("exact", "few")}
    return [
        ModeRecord(
            matrix=name,
            num_nodes=len(matrix),
            ranks_per_node=ranks_per_node,
            latency_us=links.latency_us,
            internode_gbs=links.internode_gbs,
            mode=mode,
            is_chosen=mode == chosen,
            lower_bound_bytes=bound,
            total_bytes=stages.total_bytes,
            ratio=round(stages.total_bytes / bound, 6) if bound else 1.0,
            num_stages=stages.num_stages,
            modelled_us=round(stages_us(stages, ranks_per_node, links), 3),
            dst_node=stages.dst_node.tolist(),
            num_bytes=stages.num_bytes.tolist(),
            duration_bytes=stages.duration_bytes.tolist(),
        )
        for mode, stages in mode_to_stages.items()
    ]
