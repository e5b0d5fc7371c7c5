"""From what ranks measured on their GPUs to one record for each variant."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median

import torch

from fusco.bench.device_shuffle import DeviceResult
from fusco.bench.environment import commit, hardware, versions
from fusco.bench.traffic import Workload


@dataclass(frozen=True, kw_only=True)
class DeviceRecord:
    """One variant's line. Times in milliseconds, on the device: medians over iterations of the slowest rank's.

    ``None`` stands where a variant was not timed. ``remote_row_bytes`` is what the neediest rank must take in from
    others, each row once; ``dispatch_gbs`` and ``combine_gbs`` are those bytes over the time, and the ``_of_peak``
    fractions hold them against the copy engine (pulling for dispatch, pushing for combine).
    """

    variant: str
    traffic: str
    nodes: int
    ranks_per_node: int
    tokens: int
    hidden: int
    num_experts: int
    num_topk: int
    dtype: str
    device: str
    verified: bool
    dispatch_ms: float | None
    combine_ms: float | None
    total_ms: float | None
    remote_row_bytes: int
    dispatch_gbs: float | None
    combine_gbs: float | None
    dispatch_of_peak: float | None
    combine_of_peak: float | None
    num_sms: dict[str, int]
    kernel_us: dict[str, float]
    peaks: dict[str, float]
    num_iterations: int
    trace: str
    versions: dict[str, str]
    hardware: dict[str, str | int | float]
    commit: str
    errors: list[str]


def summarize_device(workload: Workload, ranks: Sequence[DeviceResult], num_iterations: int) -> list[DeviceRecord]:
    """One record for each variant, from all ranks' results."""
    return [_summarize_variant(variant, workload, ranks, num_iterations) for variant in ranks[0].times]


def _summarize_variant(
    variant: str, workload: Workload, ranks: Sequence[DeviceResult], num_iterations: int
) -> DeviceRecord:
    def slowest(name: str) -> float | None:
        of_ranks = [getattr(rank.times[variant], name) for rank in ranks]
        return round(median(map(max, zip(*of_ranks, strict=True))), 4) if of_ranks[0] else None

    def share(rate: float | None, peak: float) -> float | None:
        return round(rate / peak, 3) if rate and peak else None

    is_ours = variant.startswith("fusco")
    peaks = ranks[0].peaks
    num_bytes = max(rank.remote_row_bytes for rank in ranks)
    if variant == "fusco-fp8":  # a byte for each value, and a float32 scale for each block
        num_bytes = num_bytes // workload.bytes_per_token * (workload.hidden + 4 * -(-workload.hidden // 128))
    dispatch_ms, combine_ms = slowest("dispatch_ms"), slowest("combine_ms")
    dispatch_gbs, combine_gbs = (
        round(num_bytes / 1e6 / time_ms, 1) if time_ms else None for time_ms in (dispatch_ms, combine_ms)
    )
    errors = [error for rank in ranks for error in rank.errors[variant]]
    return DeviceRecord(
        variant=variant,
        traffic=workload.pattern.value,
        nodes=workload.topology.num_nodes,
        ranks_per_node=workload.topology.ranks_per_node,
        tokens=workload.tokens,
        hidden=workload.hidden,
        num_experts=workload.placement.num_experts,
        num_topk=workload.num_topk,
        dtype="float8_e4m3fn" if variant == "fusco-fp8" else str(workload.dtype).removeprefix("torch."),
        device="cuda",
        verified=not errors,
        dispatch_ms=dispatch_ms,
        combine_ms=combine_ms,
        total_ms=slowest("total_ms"),
        remote_row_bytes=num_bytes,
        dispatch_gbs=dispatch_gbs,
        combine_gbs=combine_gbs,
        dispatch_of_peak=share(dispatch_gbs, peaks.copy_engine_pull_gbs),
        combine_of_peak=share(combine_gbs, peaks.copy_engine_push_gbs),
        num_sms=ranks[0].num_sms if is_ours else {},
        kernel_us=ranks[0].kernel_us if variant == "fusco" else {},
        peaks=asdict(peaks),
        num_iterations=num_iterations,
        trace=workload.trace.name if workload.trace else "",
        versions=versions(),
        hardware={**hardware(), "gpu": torch.cuda.get_device_name(0)},
        commit=commit(),
        errors=errors,
    )
