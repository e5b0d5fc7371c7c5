"""What each rank does in ``fusco bench shuffle``: verify the law, then time fusco and the baseline in turn."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist

from fusco.balancer import BALANCERS
from fusco.bench.baseline import BaselineShuffle
from fusco.bench.law import WorldInput
from fusco.bench.links import LinkPeaks, measure_links
from fusco.bench.progress import ProgressReporter
from fusco.bench.traffic import Workload
from fusco.bench.verification import verify
from fusco.communicator import Communicator
from fusco.engine.profile import CallProfile
from fusco.settings import Settings

_NUM_WARM_UPS = 2


@dataclass(frozen=True)
class Shuffle:
    """A way to shuffle: dispatch, combine, and what its latest call cost."""

    dispatch: Callable[[], tuple[torch.Tensor, list[int], object]]
    combine: Callable[[torch.Tensor, object], torch.Tensor]
    profile: Callable[[], CallProfile]


@dataclass(frozen=True)
class Iteration:
    """One timed dispatch and combine on one rank; times in seconds."""

    dispatch_s: float
    combine_s: float
    dispatch: CallProfile
    combine: CallProfile


@dataclass
class RankResult:
    """What one rank measured. ``errors`` lists, for each variant, where it broke the law; empty if nowhere."""

    links: LinkPeaks
    errors: dict[str, list[str]] = field(default_factory=dict)
    iterations: dict[str, list[Iteration]] = field(default_factory=dict)


def run_rank(
    group: dist.ProcessGroup,
    workload: Workload,
    settings: Settings,
    balancer: str,
    num_iterations: int,
    progress_port: int,
) -> RankResult:
    """One rank's part of the benchmark; every step is reported as progress by rank 0."""
    rank = dist.get_rank(group)
    progress = ProgressReporter(progress_port) if rank == 0 else None
    x, routing = workload.rows(rank), workload.routing(rank)
    assert routing.topk_weights is not None
    weights = routing.topk_weights
    result = RankResult(measure_links(group, workload.topology))
    with Communicator(
        group,
        num_experts=workload.placement.num_experts,
        num_topk=workload.num_topk,
        max_tokens_per_rank=workload.tokens,
        max_bytes_per_token=workload.bytes_per_token,
        expert_placement=workload.placement.expert_to_rank,
        ranks_per_node=workload.topology.ranks_per_node,
        balancer=BALANCERS[balancer],
        settings=settings,
    ) as comm:
        baseline = BaselineShuffle(group, workload.placement, workload.topology)

        def dispatch() -> tuple[torch.Tensor, list[int], object]:
            dispatched = comm.dispatch(x, routing.topk_idx, weights)
            return dispatched.rows, dispatched.num_rows_per_expert.tolist(), dispatched.handle

        variants = {
            "fusco": Shuffle(dispatch, comm.combine, lambda: comm.profile),  # type: ignore[arg-type]
            "baseline": Shuffle(
                lambda: baseline.dispatch(x, routing.topk_idx, weights),
                baseline.combine,  # type: ignore[arg-type]
                lambda: baseline.profile,
            ),
        }
        world = WorldInput.of(workload)
        for name, shuffle in variants.items():
            result.errors[name] = verify(shuffle, workload, world, rank)
            _step(progress)
        for iteration in range(_NUM_WARM_UPS + num_iterations):
            for name, shuffle in variants.items():
                measured = _measure(shuffle, group)
                if iteration >= _NUM_WARM_UPS:
                    result.iterations.setdefault(name, []).append(measured)
            _step(progress)
    return result


def num_steps(num_iterations: int) -> int:
    """How many steps ``run_rank`` reports: one for verifying each variant, one for each iteration."""
    return 2 + _NUM_WARM_UPS + num_iterations


def _step(progress: ProgressReporter | None) -> None:
    if progress:
        progress.advance()


def _measure(shuffle: Shuffle, group: dist.ProcessGroup) -> Iteration:
    dist.barrier(group)
    start = time.perf_counter()
    rows, _, handle = shuffle.dispatch()
    dispatched = time.perf_counter()
    dispatch_profile = replace(shuffle.profile())
    dist.barrier(group)
    resumed = time.perf_counter()
    shuffle.combine(rows, handle)
    return Iteration(
        dispatch_s=dispatched - start,
        combine_s=time.perf_counter() - resumed,
        dispatch=dispatch_profile,
        combine=replace(shuffle.profile()),
    )
