"""Each rank's part of ``fusco bench shuffle`` on the CPU: verify every variant, then time them in turn."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import torch.distributed as dist

from fusco.bench.harness.links import LinkPeaks, measure_links
from fusco.bench.harness.rounds import measure_in_turn
from fusco.bench.harness.stopwatch import CoreTimes
from fusco.bench.inputs.traffic import Workload, WorldInput
from fusco.bench.shuffle.factory import Shuffle, ShuffleFactory
from fusco.bench.shuffle.run import ShuffleRun
from fusco.bench.shuffle.verification import verify
from fusco.core.profile import CallProfile
from fusco.ranks.progress import ProgressReporter

_NUM_WARM_UPS = 2


@dataclass(frozen=True)
class Iteration:
    """One timed dispatch and combine on one rank; times in seconds. ``cores`` is of both together."""

    dispatch_s: float
    combine_s: float
    dispatch: CallProfile
    combine: CallProfile
    cores: CoreTimes


@dataclass(frozen=True)
class RankResult:
    """Measurements of one rank with one workload.

    ``errors`` lists, for each variant, what differs from the specification; empty if nothing does.
    """

    links: LinkPeaks
    errors: dict[str, list[str]]
    iterations: dict[str, list[Iteration]]


def run_rank(group: dist.ProcessGroup, run: ShuffleRun, progress_port: int | None) -> list[RankResult]:
    """Run one rank's part and return a result for each workload; rank 0 reports every step as progress."""
    rank = dist.get_rank(group)
    num_steps = sum(len(run.variants) + _num_warm_ups(workload) + run.num_iterations for workload in run.workloads)
    advance = ProgressReporter(rank, progress_port, num_steps).advance
    links, results = measure_links(group, run.topology), []
    with ShuffleFactory(group, run) as factory:
        for workload in run.workloads:
            errors, world = dict[str, list[str]](), WorldInput.of(workload)
            variants = {name: factory.make(name, workload, world) for name in run.variants}
            for name, shuffle in variants.items():
                errors[name] = verify(shuffle, workload, world, rank)
                advance()
            iterations = measure_in_turn(
                variants,
                lambda shuffle: _measure(shuffle, group),
                advance,
                num_warm_ups=_num_warm_ups(workload),
                num_iterations=run.num_iterations,
            )
            results.append(RankResult(links, errors, iterations))
    return results


def _num_warm_ups(workload: Workload) -> int:
    """Return the iterations that are not timed: one in later batches of a prefill."""
    return 1 if workload.batch and workload.batch.number else _NUM_WARM_UPS


def _measure(shuffle: Shuffle, group: dist.ProcessGroup) -> Iteration:
    dist.barrier(group)
    cores = CoreTimes.now()
    start = time.perf_counter()
    rows, _, handle = shuffle.dispatch()
    dispatched = time.perf_counter()
    dispatch_profile = replace(shuffle.profile())
    dist.barrier(group)
    resumed = time.perf_counter()
    shuffle.combine(rows, handle)
    combined = time.perf_counter()
    return Iteration(
        dispatch_s=dispatched - start,
        combine_s=combined - resumed,
        cores=CoreTimes.now().since(cores),
        dispatch=dispatch_profile,
        combine=replace(shuffle.profile()),
    )
