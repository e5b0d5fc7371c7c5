"""One record for each matrix, made of all ranks' measurements in ``fusco bench alltoall``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from fusco.bench.alltoall import ExchangeResult, ExchangeRun
from fusco.bench.environment import Measurement, hardware
from fusco.bench.links import LinkPeaks
from fusco.core.profile import CallProfile
from fusco.schedule.cost import CPU_LINKS, CUDA_LINKS, schedule_for
from fusco.schedule.stages import lower_bound_bytes


@dataclass(frozen=True, kw_only=True)
class ExchangeRecord(Measurement):
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

    matrix: str
    skew: float
    seed: int
    nodes: int
    ranks_per_node: int
    bytes_per_rank: int
    verified: bool
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
    rank_gbs: float
    copy_peak_gbs: float
    num_iterations: int
    slice_bytes: int | None
    ring_depth: int
    device: str
    errors: list[str]


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

    def profile_ms(of: Callable[[CallProfile], float]) -> float:
        return _slowest_ms([[of(profile) for profile in rank.profiles] for rank in ranks])

    return ExchangeRecord(
        matrix=run.matrix,
        skew=run.skew if run.matrix == "zipf" else 0.0,
        seed=run.seed,
        nodes=run.topology.num_nodes,
        ranks_per_node=ranks_per_node,
        bytes_per_rank=run.bytes_per_rank,
        verified=not errors,
        fusco_ms=_slowest_ms([rank.seconds["fusco"] for rank in ranks]),
        planning_ms=profile_ms(lambda profile: profile.planning_s),
        wire_ms=profile_ms(lambda profile: profile.wire_s),
        all_to_all_single_ms=_slowest_ms([rank.seconds["all_to_all_single"] for rank in ranks]),
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
        rank_gbs=run.rank_gbs,
        copy_peak_gbs=round(median(peaks.copy_gbs for peaks in links), 3),
        num_iterations=len(ranks[0].profiles),
        slice_bytes=run.settings.slice_bytes,
        ring_depth=run.settings.ring_depth,
        device=run.device,
        hardware=hardware(run.device),
        errors=errors,
    )


def _slowest_ms(per_rank: Sequence[Sequence[float]]) -> float:
    slowest: list[float] = [max(of_iteration) for of_iteration in zip(*per_rank, strict=True)]
    return round(median(slowest) * 1e3, 3)
