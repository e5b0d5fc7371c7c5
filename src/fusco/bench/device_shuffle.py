"""What each rank does in ``fusco bench shuffle --device cuda``: verify the law, then time every variant in one run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from fusco.bench.baseline import BaselineShuffle
from fusco.bench.device_links import DevicePeaks, measure_device_links
from fusco.bench.law import WorldInput, expected_rows
from fusco.bench.peers import import_peers
from fusco.bench.progress import ProgressReporter
from fusco.bench.stopwatch import Stopwatch
from fusco.bench.traffic import Workload
from fusco.bench.verification import verify
from fusco.communicator import Communicator
from fusco.launch import Launch, StaticSlots
from fusco.settings import Settings

_FP8_BLOCK = 128  # values that share a scale
KERNELS = ("plan", "stage_rows", "scatter_rows", "combine_rows")


@dataclass(frozen=True)
class DeviceShuffle:
    """A way to shuffle.

    Attributes:
        dispatch: gives expert-major rows, rows of each local expert, and whatever ``combine`` needs.
        combine: gives token-major rows.
        is_graph: whether it is captured in a CUDA graph and replayed.

    """

    dispatch: Callable[[], tuple[torch.Tensor, torch.Tensor | list[int], Any]]
    combine: Callable[[torch.Tensor, Any], torch.Tensor]
    is_graph: bool = False


@dataclass
class DeviceTimes:
    """One variant's times on one rank, in milliseconds, one for each iteration; empty where it was not timed."""

    dispatch_ms: list[float] = field(default_factory=list)
    combine_ms: list[float] = field(default_factory=list)
    total_ms: list[float] = field(default_factory=list)


@dataclass
class DeviceResult:
    """What one rank measured.

    Attributes:
        peaks: of the links.
        remote_row_bytes: rows of other ranks that it needs, each once.
        errors: for each variant, where it broke the law; empty if nowhere.
        times: for each variant.
        kernel_us: median duration of each of fusco's kernels, waiting for peers included.
        num_sms: most multiprocessors that fusco's dispatch and combine took.

    """

    peaks: DevicePeaks
    remote_row_bytes: int
    errors: dict[str, list[str]] = field(default_factory=dict)
    times: dict[str, DeviceTimes] = field(default_factory=dict)
    kernel_us: dict[str, float] = field(default_factory=dict)
    num_sms: dict[str, int] = field(default_factory=dict)


def run_device_rank(
    group: dist.ProcessGroup,
    workload: Workload,
    settings: Settings,
    num_sms: int | None,
    num_iterations: int,
    progress_port: int,
) -> DeviceResult:
    """One rank's part of the benchmark; rank 0 reports every step as progress."""
    rank = dist.get_rank(group)
    progress = ProgressReporter(progress_port) if rank == 0 else None
    stopwatch = Stopwatch(group)
    world = WorldInput.of(workload, "cuda")
    result = DeviceResult(measure_device_links(group, stopwatch), _remote_row_bytes(world, workload, rank))
    _step(progress)
    with _communicator(group, workload, settings) as comm:
        variants = _variants(group, comm, workload, world, Launch(num_sms=num_sms))
        for name, shuffle in variants.items():
            result.errors[name] = verify(shuffle, workload, world, rank, max_spare_rows=1)
            dist.barrier(group)
            result.times[name] = _time(shuffle, stopwatch, num_iterations)
            _step(progress)
        result.errors["fusco-fp8"], result.times["fusco-fp8"] = _fp8(
            comm, workload, world, stopwatch, Launch(num_sms=num_sms), num_iterations
        )
        _step(progress)
        result.num_sms, result.kernel_us = _look_inside(comm, variants["fusco"], stopwatch)
        _step(progress)
    return result


def num_device_steps() -> int:
    """How many steps ``run_device_rank`` reports, peers not counted."""
    return 7


def _step(progress: ProgressReporter | None) -> None:
    if progress:
        progress.advance()


@contextmanager
def _communicator(group: dist.ProcessGroup, workload: Workload, settings: Settings) -> Iterator[Communicator]:
    with Communicator(
        group,
        num_experts=workload.placement.num_experts,
        num_topk=workload.num_topk,
        max_tokens_per_rank=workload.tokens,
        max_bytes_per_token=workload.bytes_per_token,
        expert_placement=workload.placement.expert_to_rank,
        settings=settings,
        device="cuda",
    ) as comm:
        yield comm


def _variants(
    group: dist.ProcessGroup, comm: Communicator, workload: Workload, world: WorldInput, launch: Launch
) -> dict[str, DeviceShuffle]:
    """What is compared: fusco sized exactly; with static slots, in a graph; with rows in place; others."""
    x, ids, weights = (part[comm.rank] for part in (world.rows, world.topk_idx, world.topk_weights))
    baseline = BaselineShuffle(group, workload.placement, workload.topology, "cuda")
    static = StaticSlots(max(1, comm.dispatch(x, ids, weights).handle.num_slots))
    visible = comm.empty(x.shape, x.dtype)
    visible.copy_(x)

    def dispatch(rows: torch.Tensor, size: StaticSlots | None) -> tuple[torch.Tensor, torch.Tensor, Any]:
        sent = comm.dispatch(rows, ids, weights, static=size, launch=launch)
        return sent.rows, sent.num_rows_per_expert, sent.handle

    def combine(rows: torch.Tensor, handle: Any) -> torch.Tensor:
        return comm.combine(rows, handle, launch=launch)

    return {
        "fusco": DeviceShuffle(lambda: dispatch(x, None), combine),
        "fusco-graph": DeviceShuffle(lambda: dispatch(x, static), combine, is_graph=True),
        "fusco-in-place": DeviceShuffle(lambda: dispatch(visible, static), combine, is_graph=True),
        "baseline": DeviceShuffle(lambda: baseline.dispatch(x, ids, weights), baseline.combine),
        **import_peers(group, workload, x, ids, weights),
    }


def _time(shuffle: DeviceShuffle, stopwatch: Stopwatch, num_iterations: int) -> DeviceTimes:
    rows, _, handle = shuffle.dispatch()
    parts = {
        "dispatch_ms": shuffle.dispatch,
        "combine_ms": lambda: shuffle.combine(rows, handle),
        "total_ms": lambda: shuffle.combine(*_without_counts(shuffle.dispatch())),
    }
    times = DeviceTimes()
    for name, work in parts.items():
        if shuffle.is_graph:
            with _captured(work) as replay:
                setattr(times, name, stopwatch.times_ms(replay, num_iterations))
        else:
            setattr(times, name, stopwatch.times_ms(work, num_iterations))
    return times


def _without_counts(sent: tuple[torch.Tensor, Any, Any]) -> tuple[torch.Tensor, Any]:
    return sent[0], sent[2]


@contextmanager
def _captured(work: Callable[[], object]) -> Iterator[Callable[[], None]]:
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    yield graph.replay
    torch.cuda.synchronize()


def _fp8(
    comm: Communicator,
    workload: Workload,
    world: WorldInput,
    stopwatch: Stopwatch,
    launch: Launch,
    num_iterations: int,
) -> tuple[list[str], DeviceTimes]:
    """Dispatch of float8 values with a float32 scale for each block, in one pass; captured, with static slots."""
    num_scales = -(-workload.hidden // _FP8_BLOCK)
    values = [rows.to(torch.float8_e4m3fn) for rows in world.rows]
    scales = [rows[:, :num_scales].float().contiguous() for rows in world.rows]
    ids, weights = world.topk_idx[comm.rank], world.topk_weights[comm.rank]
    payloads = [values[comm.rank], scales[comm.rank]]
    static = StaticSlots(max(1, comm.dispatch(payloads, ids, weights).handle.num_slots))
    sent = comm.dispatch(payloads, ids, weights, static=static, launch=launch)
    experts = workload.placement.rank_to_experts[comm.rank]
    errors = []
    for name, seen, rows in (("values", sent.rows, values), ("scales", sent.more_rows[0], scales)):
        as_bytes = [part.view(torch.uint8) for part in rows]
        expected, _ = expected_rows(WorldInput(as_bytes, world.topk_idx, world.topk_weights), experts)
        if not torch.equal(seen.view(torch.uint8)[: len(expected)], expected):
            errors.append(f"rank {comm.rank}: dispatched float8 {name} are wrong")
    with _captured(lambda: comm.dispatch(payloads, ids, weights, static=static, launch=launch)) as replay:
        return errors, DeviceTimes(dispatch_ms=stopwatch.times_ms(replay, num_iterations))


def _look_inside(
    comm: Communicator, shuffle: DeviceShuffle, stopwatch: Stopwatch
) -> tuple[dict[str, int], dict[str, float]]:
    rows, _, handle = shuffle.dispatch()
    num_sms = {"dispatch": comm.profile.num_sms}
    shuffle.combine(rows, handle)
    num_sms["combine"] = comm.profile.num_sms
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        stopwatch.times_ms(lambda: shuffle.combine(*_without_counts(shuffle.dispatch())), 10)
    durations: dict[str, list[float]] = {}
    for event in recorded.events() or []:
        if event.name in KERNELS:
            durations.setdefault(event.name, []).append(event.time_range.elapsed_us())
    return num_sms, {name: round(median(of_kernel), 1) for name, of_kernel in durations.items()}


def _remote_row_bytes(world: WorldInput, workload: Workload, rank: int) -> int:
    experts = torch.tensor(workload.placement.rank_to_experts[rank], device="cuda")
    remote = [ids for src, ids in enumerate(world.topk_idx) if src != rank]
    return sum(int(torch.isin(ids, experts).any(1).sum()) for ids in remote) * workload.bytes_per_token
