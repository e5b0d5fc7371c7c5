"""``fusco bench alltoall``: ranks verify, then time fusco and ``all_to_all_single`` in turn; records of matrices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
import torch
import torch.distributed as dist

from fusco.api.communicator import Communicator
from fusco.bench.harness.environment import VerifiedMeasurement, record_of
from fusco.bench.harness.links import LinkPeaks, measure_links
from fusco.bench.harness.stopwatch import RankTimer, measure_in_turn, slowest_median
from fusco.bench.ranks.progress import ProgressReporter
from fusco.core.config import Settings
from fusco.core.lanes import IntArray
from fusco.core.profile import CallProfile
from fusco.core.topology import ScheduleMode, Topology
from fusco.schedule.cost import CPU_LINKS, CUDA_LINKS, schedule_for
from fusco.schedule.stages import lower_bound_bytes

VARIANTS = ("fusco", "all_to_all_single")
_NUM_WARM_UPS = 2
_Variants = dict[str, tuple[Callable[[], object], torch.Tensor]]  # a call and its output by name


@dataclass(frozen=True)
class ExchangeResult:
    """Measurements of one rank with one matrix."""

    errors: list[str]  # where fusco's output differs from that of ``all_to_all_single``; empty if nowhere
    times_ms: dict[str, list[float]]  # of each variant by iteration
    profiles: list[CallProfile]  # fusco's


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """Values that a run and its record have; ``skew`` is 0 except for the Zipf matrix."""

    matrix: str
    skew: float
    seed: int
    bytes_per_rank: int
    device: str
    rank_gbs: float


@dataclass(frozen=True, kw_only=True)
class ExchangeRun(Exchange):
    """One matrix of a run, and its configuration; runs together differ in their matrices only."""

    rank_bytes: IntArray
    topology: Topology
    mode: ScheduleMode | None
    settings: Settings


def run_rank(
    group: dist.ProcessGroup, runs: Sequence[ExchangeRun], num_iterations: int, progress_port: int | None
) -> tuple[LinkPeaks, list[ExchangeResult]]:
    """Run one rank's part of the benchmark; rank 0 reports every step as progress."""
    rank, topology, device = dist.get_rank(group), runs[0].topology, runs[0].device
    advance = ProgressReporter(rank, progress_port, len(runs) * (1 + _NUM_WARM_UPS + num_iterations)).advance
    links, timer, results = measure_links(group, topology, device), RankTimer(group, device), []
    with Communicator(
        group,
        num_experts=topology.world_size,
        num_topk=1,
        max_tokens_per_rank=1,
        max_bytes_per_token=1,
        ranks_per_node=topology.ranks_per_node,
        settings=runs[0].settings,
        device=device,
    ) as comm:
        for run in runs:
            variants = _variants(comm, group, run)
            errors = _verify(variants, rank)
            advance()
            measured = measure_in_turn(
                variants,
                lambda variant: (timer.host_times_ms(variant[0])[0], comm.profile),
                advance,
                num_warm_ups=_NUM_WARM_UPS,
                num_iterations=num_iterations,
            )
            times_ms = {name: [ms for ms, _ in of_variant] for name, of_variant in measured.items()}
            results.append(ExchangeResult(errors, times_ms, [profile for _, profile in measured["fusco"]]))
    return links, results


def _variants(comm: Communicator, group: dist.ProcessGroup, run: ExchangeRun) -> _Variants:
    """Return a call and its output for each variant, on the same random bytes."""
    matrix, schedule, device = run.rank_bytes, run.mode, run.device
    send, receive = matrix[comm.rank].tolist(), matrix[:, comm.rank].tolist()
    generator = torch.Generator().manual_seed(comm.rank)
    sent = torch.randint(0, 256, (sum(send),), dtype=torch.uint8, generator=generator, device="cpu").to(device)
    by_fusco, by_torch = (torch.empty(sum(receive), dtype=torch.uint8, device=device) for _ in VARIANTS)
    return {
        "fusco": (lambda: comm.all_to_all(by_fusco, sent, receive, send, schedule=schedule), by_fusco),
        "all_to_all_single": (lambda: dist.all_to_all_single(by_torch, sent, receive, send, group=group), by_torch),
    }


def _verify(variants: _Variants, rank: int) -> list[str]:
    for i, (call, output) in enumerate(variants.values()):
        output.fill_(255 * i)  # neither can pass on old contents of memory
        call()
    by_fusco, by_torch = (output for _, output in variants.values())
    if not len(wrong := (by_fusco != by_torch).nonzero().squeeze(1)):
        return []
    return [f"rank {rank}: {len(wrong)} of {len(by_fusco)} bytes differ, the first at {int(wrong[0])}"]


@dataclass(frozen=True, kw_only=True)
class ExchangeRecord(Exchange, VerifiedMeasurement):
    """One matrix's line. Times in milliseconds: medians over iterations of the slowest rank's.

    ``internode_bytes`` of all ranks were counted while fusco sent them. Every byte must be sent between nodes once, so
    ``internode_bytes_needed`` is the sum of the matrix between nodes. ``lane_bytes_lower_bound`` is the busiest node's
    share per rank (largest row or column sum between nodes over ranks per node), ``lane_bytes`` what the schedule's
    stages take, and ``busiest_rank_bytes`` what the busiest rank sends or receives between nodes in
    ``all_to_all_single``. ``lower_bound_ms`` is the time of ``lane_bytes_lower_bound`` at the peak between nodes of the
    same run, with all ranks sending at once, or on a testbed at the rate of a rank's rails (``rank_gbs``, elsewhere 0).
    ``staged_bytes`` are those that ranks of a node pass to each other before
    or after they travel between nodes.
    """

    nodes: int
    ranks_per_node: int
    fusco_ms: float
    planning_ms: float
    wire_ms: float
    all_to_all_single_ms: float
    lower_bound_ms: float
    schedule: str
    num_stages: int
    internode_bytes: int
    internode_bytes_needed: int
    lane_bytes: int
    lane_bytes_lower_bound: int
    busiest_rank_bytes: int
    intranode_bytes: int
    staged_bytes: int
    internode_peak_gbs: float
    copy_peak_gbs: float
    num_iterations: int
    slice_bytes: int | None
    ring_depth: int

    @property
    def is_right(self) -> bool:
        """Verified, and fusco sent every byte between nodes once."""
        return self.verified and self.internode_bytes == self.internode_bytes_needed


def summarize(run: ExchangeRun, links: Sequence[LinkPeaks], ranks: Sequence[ExchangeResult]) -> ExchangeRecord:
    """Return the record of one matrix, from all ranks' results."""
    links_of = CUDA_LINKS if run.device == "cuda" else CPU_LINKS
    schedule = schedule_for(run.rank_bytes, run.topology, links_of, run.mode)
    ranks_per_node = run.topology.ranks_per_node
    node = np.array(run.topology.rank_to_node)
    internode = np.where(node[:, None] != node, run.rank_bytes, 0)
    peak_gbs = median(peaks.internode.best_gbs for peaks in links)
    rate_gbs, bound = run.rank_gbs or peak_gbs, -(-lower_bound_bytes(schedule.stages.node_bytes()) // ranks_per_node)
    errors = [error for rank in ranks for error in rank.errors]

    def profile_ms(name: str) -> float:
        return slowest_median([[getattr(profile, name) * 1e3 for profile in rank.profiles] for rank in ranks])

    return record_of(
        ExchangeRecord,
        run,
        run.topology,
        run.settings,
        nodes=run.topology.num_nodes,
        verified=not errors,
        **{f"{name}_ms": slowest_median(rank.times_ms[name] for rank in ranks) for name in VARIANTS},
        planning_ms=profile_ms("planning_s"),
        wire_ms=profile_ms("wire_s"),
        lower_bound_ms=round(bound / rate_gbs / 1e6, 3) if rate_gbs else 0.0,
        schedule=schedule.mode,
        num_stages=schedule.stages.num_stages,
        internode_bytes=sum(rank.profiles[-1].internode_row_bytes for rank in ranks),
        internode_bytes_needed=int(internode.sum()),
        lane_bytes=-(-schedule.stages.total_bytes // ranks_per_node),
        lane_bytes_lower_bound=bound,
        busiest_rank_bytes=lower_bound_bytes(internode),
        intranode_bytes=sum(rank.profiles[-1].intranode_row_bytes for rank in ranks),
        staged_bytes=int(schedule.balancing.num_bytes.sum() + schedule.redistribution.num_bytes.sum()),
        internode_peak_gbs=round(peak_gbs, 3),
        copy_peak_gbs=round(median(peaks.copy_gbs for peaks in links), 3),
        num_iterations=len(ranks[0].profiles),
        errors=errors,
    )
