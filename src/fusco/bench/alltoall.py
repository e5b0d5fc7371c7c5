"""Each rank's part of ``fusco bench alltoall``: verify, then time fusco and ``all_to_all_single`` in turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from fusco.api.communicator import Communicator
from fusco.bench.links import LinkPeaks, measure_links
from fusco.core.config import Settings
from fusco.core.profile import CallProfile
from fusco.core.topology import Topology
from fusco.ranks.progress import ProgressReporter
from fusco.schedule.schedule import ScheduleMode
from fusco.schedule.stages import IntArray

VARIANTS = ("fusco", "all_to_all_single")
_NUM_WARM_UPS = 2
_Variants = dict[str, tuple[Callable[[], object], torch.Tensor]]  # a call and its output by name


@dataclass
class ExchangeResult:
    """Measurements of one rank with one matrix: seconds of each variant by iteration, and fusco's profiles.

    ``errors`` describes where fusco's output differs from that of ``all_to_all_single``; empty if nowhere.
    """

    errors: list[str] = field(default_factory=list)
    seconds: dict[str, list[float]] = field(default_factory=lambda: {variant: [] for variant in VARIANTS})
    profiles: list[CallProfile] = field(default_factory=list)


def num_steps(num_matrices: int, num_iterations: int) -> int:
    """Return how many steps ``run_rank`` reports."""
    return num_matrices * (1 + _NUM_WARM_UPS + num_iterations)


@dataclass(frozen=True, kw_only=True)
class ExchangeRun:
    """One matrix of a run, and its configuration; runs together differ in their matrices only."""

    matrix: str
    rank_bytes: IntArray
    topology: Topology
    bytes_per_rank: int
    skew: float
    seed: int
    mode: ScheduleMode | None
    settings: Settings
    device: str = "cpu"
    rank_gbs: float = 0.0


def run_rank(
    group: dist.ProcessGroup, runs: Sequence[ExchangeRun], num_iterations: int, progress_port: int | None
) -> tuple[LinkPeaks, list[ExchangeResult]]:
    """Run one rank's part of the benchmark; rank 0 reports every step as progress."""
    rank, topology, device = dist.get_rank(group), runs[0].topology, runs[0].device
    advance = ProgressReporter.of_rank(rank, progress_port).advance
    links, results = measure_links(group, topology, device), []
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
            results.append(ExchangeResult(_verify(variants, rank)))
            advance()
            for iteration in range(_NUM_WARM_UPS + num_iterations):
                _time(variants, comm, group, results[-1] if iteration >= _NUM_WARM_UPS else ExchangeResult())
                advance()
    return links, results


def _time(variants: _Variants, comm: Communicator, group: dist.ProcessGroup, result: ExchangeResult) -> None:
    """Time one call of each variant."""
    finish: Callable[[], None] = torch.cuda.synchronize if variants["fusco"][1].is_cuda else lambda: None
    for name, (call, _) in variants.items():
        finish()
        dist.barrier(group)
        start = time.perf_counter()
        call()
        finish()
        result.seconds[name].append(time.perf_counter() - start)
        if name == "fusco":
            result.profiles.append(comm.profile)


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
