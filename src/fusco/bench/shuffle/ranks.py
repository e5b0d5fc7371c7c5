"""Each rank's part of ``fusco bench shuffle``: verify every variant, then time it; on CPUs all in turn."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from fusco.api.communicator import Communicator
from fusco.bench.harness.links import DevicePeaks, LinkPeaks, measure_device_links, measure_links
from fusco.bench.harness.stopwatch import CoreTimes, RankTimer, captured, made, measure_in_turn
from fusco.bench.inputs.traffic import Workload, WorldInput
from fusco.bench.ranks.progress import ProgressReporter
from fusco.bench.shuffle.factory import Shuffle, ShuffleFactory
from fusco.bench.shuffle.run import ShuffleRun
from fusco.bench.shuffle.variants import PEERS, recorded_variant
from fusco.bench.shuffle.verification import expected_rows, verify
from fusco.core.config import Launch, StaticRows
from fusco.core.profile import CallProfile
from fusco.core.timeline import Span

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

    ``errors`` lists, for each variant, what differs from the specification; empty if nothing does. ``spans`` are of
    one dispatch and combine of fusco, if recorded.
    """

    links: LinkPeaks
    errors: dict[str, list[str]]
    iterations: dict[str, list[Iteration]]
    spans: list[Span] = field(default_factory=list)


def run_rank(
    group: dist.ProcessGroup, run: ShuffleRun, progress_port: int | None
) -> list[RankResult] | list[DeviceResult]:
    """Run one rank's part and return a result for each workload; rank 0 reports every step as progress."""
    run_here = _run_on_cpu if run.device == "cpu" else _run_on_device
    return run_here(group, run, progress_port)


def _run_on_cpu(group: dist.ProcessGroup, run: ShuffleRun, progress_port: int | None) -> list[RankResult]:
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
            spans: list[Span] = []
            if run.has_timeline and (recorded := recorded_variant(run.variants)):
                spans = _record(factory.communicator(), variants[recorded], lambda: dist.barrier(group))
            results.append(RankResult(links, errors, iterations, spans))
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


_FP8 = "fusco-fp8"
_FP8_BLOCK = 128  # values that share a scale
KERNELS = ("plan", "scatter_rows", "combine_rows")


@dataclass
class DeviceTimes:
    """One variant's times on one rank, in milliseconds, one for each iteration; empty if it was not timed.

    The first three are the device's, of work that the host enqueues ahead: what the host takes to launch it shows only
    where the device waits for the host. The others are the host's, of a dispatch and a combine.
    """

    dispatch_ms: list[float] = field(default_factory=list)  # dispatch alone
    combine_ms: list[float] = field(default_factory=list)  # combine alone
    total_ms: list[float] = field(default_factory=list)  # dispatch followed by combine
    loop_ms: list[float] = field(default_factory=list)  # each of 20 calls in a row, one value for each repetition
    idle_ms: list[float] = field(default_factory=list)  # from idle devices until the device has completed the call


@dataclass
class DeviceResult:
    """Measurements of one rank with one workload."""

    peaks: DevicePeaks  # of the links
    remote_row_bytes: int = 0  # rows of other ranks that it needs, each once; 0 with several nodes
    # for each variant, what differs from the specification; empty if nothing does
    errors: dict[str, list[str]] = field(default_factory=dict)
    times: dict[str, DeviceTimes] = field(default_factory=dict)  # for each variant
    # for each variant, of a dispatch and of a combine
    profiles: dict[str, tuple[CallProfile, CallProfile]] = field(default_factory=dict)
    # median duration of each of fusco's kernels, waiting for peers included; empty with several nodes
    kernel_us: dict[str, float] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)  # of one dispatch and combine of fusco, if recorded


def _run_on_device(group: dist.ProcessGroup, run: ShuffleRun, progress_port: int | None) -> list[DeviceResult]:
    num_steps = 1 + len(run.workloads) * (len(run.variants) + 1)
    progress = ProgressReporter(dist.get_rank(group), progress_port, num_steps)
    timer = RankTimer(group, "cuda")
    peaks = measure_device_links(group, run.topology, timer)
    progress.advance()
    with ShuffleFactory(group, run) as factory:
        return [_Measurement(factory, load, timer).take(DeviceResult(peaks), progress) for load in run.workloads]


class _Measurement:
    """One workload on one rank."""

    def __init__(self, factory: ShuffleFactory, workload: Workload, timer: RankTimer) -> None:
        self._factory, self._run, self._workload, self._timer = factory, factory.run, workload, timer
        self._rank, self._world = factory.group.rank(), WorldInput.of(workload, "cuda")

    def take(self, result: DeviceResult, progress: ProgressReporter) -> DeviceResult:
        """Verify and time every variant, then profile fusco's kernels."""
        run, make, shuffles = self._run, self._factory.make, dict[str, Shuffle]()
        for name in run.variants:
            if name == _FP8:
                result.errors[name], result.times[name] = self._fp8()
            elif shuffle := made(name, partial(make, name, self._workload, self._world), is_peer=name in PEERS):
                shuffles[name] = shuffle
                self._compare(name, shuffle, result)
            progress.advance()
        if run.has_timeline and (recorded := recorded_variant(run.variants)):
            result.spans = _record(self._factory.communicator(), shuffles[recorded], self._timer.align)
        if not run.has_nodes:
            result.remote_row_bytes = _remote_row_bytes(self._world, self._workload, self._rank)
        if not run.has_nodes and "fusco" in shuffles:
            result.kernel_us = _profile_kernels(shuffles["fusco"], self._timer)
        progress.advance()
        return result

    def _compare(self, name: str, shuffle: Shuffle, result: DeviceResult) -> None:
        result.errors[name] = verify(shuffle, self._workload, self._world, self._rank, max_spare_rows=1)
        rows, _, handle = shuffle.dispatch()
        dispatched = replace(shuffle.profile())
        shuffle.combine(rows, handle)
        result.profiles[name] = (dispatched, replace(shuffle.profile()))
        del rows, handle
        torch.cuda.synchronize()
        dist.barrier(self._factory.group)
        result.times[name] = _time(shuffle, self._timer, self._run.num_iterations)

    def _fp8(self) -> tuple[list[str], DeviceTimes]:
        """Dispatch of float8 values with a float32 scale for each block, in one pass; captured, with static rows."""
        comm, world, launch = self._factory.communicator(), self._world, Launch(num_sms=self._run.num_sms)
        num_scales = -(-self._workload.hidden // _FP8_BLOCK)
        values = [rows.to(torch.float8_e4m3fn) for rows in world.rows]
        scales = [rows[:, :num_scales].float().contiguous() for rows in world.rows]
        ids, weights = world.topk_idx[comm.rank], world.topk_weights[comm.rank]
        payloads = [values[comm.rank], scales[comm.rank]]
        static = StaticRows(max(1, comm.dispatch(payloads, ids, weights).handle.num_rows))
        sent = comm.dispatch(payloads, ids, weights, static=static, launch=launch)
        experts = self._workload.placement.rank_to_experts[comm.rank]
        errors = []
        for name, seen, rows in zip(("values", "scales"), sent.payloads, (values, scales), strict=True):
            as_bytes = [part.view(torch.uint8) for part in rows]
            expected, _ = expected_rows(WorldInput(as_bytes, world.topk_idx, world.topk_weights), experts)
            if not torch.equal(seen.view(torch.uint8)[: len(expected)], expected):
                errors.append(f"rank {comm.rank}: dispatched float8 {name} are wrong")
        with captured(lambda: comm.dispatch(payloads, ids, weights, static=static, launch=launch)) as replay:
            return errors, DeviceTimes(dispatch_ms=self._timer.times_ms(replay, self._run.num_iterations))


def _time(shuffle: Shuffle, timer: RankTimer, num_iterations: int) -> DeviceTimes:
    rows, _, handle = shuffle.dispatch()
    parts = {
        "dispatch_ms": shuffle.dispatch,
        "combine_ms": lambda: shuffle.combine(rows, handle),
        "total_ms": shuffle.both,
    }
    times = DeviceTimes()
    for name, work in parts.items():
        with captured(work) if shuffle.is_graph else nullcontext(work) as call:
            setattr(times, name, timer.times_ms(call, num_iterations))
            if name == "total_ms":
                times.loop_ms, times.idle_ms = timer.loop_times_ms(call), timer.idle_times_ms(call, num_iterations)
    return times


def _profile_kernels(shuffle: Shuffle, timer: RankTimer) -> dict[str, float]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # it warns that a cycle drops the ones before; there is only one
        with profile(activities=[ProfilerActivity.CUDA]) as recorded:
            timer.times_ms(shuffle.both, 10)
        events = recorded.events() or []
    durations: dict[str, list[float]] = {}
    for event in events:
        if event.name in KERNELS:
            durations.setdefault(event.name, []).append(event.time_range.elapsed_us())
    return {name: round(median(of_kernel), 1) for name, of_kernel in durations.items()}


def _record(comm: Communicator, shuffle: Shuffle, align: Callable[[], object]) -> list[Span]:
    """Record one dispatch and combine that all ranks begin together, as ``align`` makes them."""
    with comm.record_timeline() as timeline:
        align()
        timeline.begin()
        shuffle.both()
        comm.synchronize()
    return timeline.spans()


def _remote_row_bytes(world: WorldInput, workload: Workload, rank: int) -> int:
    experts = torch.tensor(workload.placement.rank_to_experts[rank], device="cuda")
    remote = [ids for src, ids in enumerate(world.topk_idx) if src != rank]
    return sum(int(torch.isin(ids, experts).any(1).sum()) for ids in remote) * workload.bytes_per_token
