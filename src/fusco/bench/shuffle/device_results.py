"""One record for each workload and variant, made of all ranks' measurements on GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from fusco.bench.inputs.traffic import Workload, internode_rows_lower_bound
from fusco.bench.shuffle.device_shuffle import DeviceResult
from fusco.bench.shuffle.results import InternodeBytesRecord, VariantRecord, describe_internode_bytes, describe_variant
from fusco.bench.shuffle.run import ShuffleRun
from fusco.core.profile import CallProfile


@dataclass(frozen=True, kw_only=True)
class DeviceRecord(VariantRecord):
    """One variant's line, within a node. Times in milliseconds: medians of the slowest rank's, see ``DeviceTimes``.

    ``None`` means that the variant was not timed. ``remote_row_bytes`` is the maximum over ranks of the rows that a
    rank must receive from others, each row once; ``dispatch_gbs`` and ``combine_gbs`` are those bytes over the time,
    and the ``_of_peak`` fractions compare them with the copy engine (pulling for dispatch, pushing for combine).
    """

    dispatch_ms: float | None
    combine_ms: float | None
    total_ms: float | None
    loop_ms: float | None
    idle_ms: float | None
    remote_row_bytes: int
    dispatch_gbs: float | None
    combine_gbs: float | None
    dispatch_of_peak: float | None
    combine_of_peak: float | None
    num_sms: dict[str, int]
    kernel_us: dict[str, float]
    peaks: dict[str, float]

    @property
    def is_right(self) -> bool:
        """Outputs are as specified."""
        return self.verified


@dataclass(frozen=True, kw_only=True)
class InternodeRecord(InternodeBytesRecord):
    """One variant's line, between nodes. Times in milliseconds: medians of the slowest rank's, see ``DeviceTimes``.

    ``empty_bytes`` are those of rows without a token, which are not among ``internode_row_bytes``. ``bound_ms`` is the
    time of ``busiest_rank_bytes`` at ``internode_peak_gbs``, and the ``_over_bound`` ratios are
    the times over it: 1 means that the network of the busiest rank was never idle. ``emulation`` says which variables
    the benchmark set so that nodes of one machine communicate over the network only; empty on a cluster.
    """

    dispatch_ms: float
    combine_ms: float
    total_ms: float
    loop_ms: float
    idle_ms: float
    empty_bytes: int
    bound_ms: float
    dispatch_over_bound: float | None
    combine_over_bound: float | None
    combine_metadata_bytes: int
    num_sms: dict[str, int]
    peaks: dict[str, float]
    emulation: str


def summarize_device(run: ShuffleRun, ranks: Sequence[Sequence[DeviceResult]]) -> list[DeviceRecord]:
    """Return one record for each variant within a node, from all ranks' results."""
    return [
        _within_node(variant, workload, run, of_ranks)
        for workload, *of_ranks in zip(run.workloads, *ranks, strict=True)
        for variant in of_ranks[0].times
    ]


def summarize_internode(
    run: ShuffleRun, ranks: Sequence[Sequence[DeviceResult]], emulation: str
) -> list[InternodeRecord]:
    """Return one record for each variant between nodes, from all ranks' results."""
    records = []
    for workload, *of_ranks in zip(run.workloads, *ranks, strict=True):
        bound = internode_rows_lower_bound(workload) * workload.bytes_per_token
        records += [_between_nodes(variant, workload, run, of_ranks, bound, emulation) for variant in run.variants]
    return records


def _within_node(variant: str, workload: Workload, run: ShuffleRun, ranks: Sequence[DeviceResult]) -> DeviceRecord:
    def share(rate: float | None, peak: float) -> float | None:
        return round(rate / peak, 3) if rate and peak else None

    peaks = ranks[0].peaks
    num_bytes = max(rank.remote_row_bytes for rank in ranks)
    if variant == "fusco-fp8":  # a byte for each value, and a float32 scale for each block
        num_bytes = num_bytes // workload.bytes_per_token * (workload.hidden + 4 * -(-workload.hidden // 128))
    times: dict[str, Any] = _slowest_times(variant, ranks)
    dispatch_gbs, combine_gbs = (
        round(num_bytes / 1e6 / times[name], 1) if times[name] else None for name in ("dispatch_ms", "combine_ms")
    )
    described = describe_variant(variant, workload, run, _errors(variant, ranks))
    if variant == "fusco-fp8":
        described["dtype"] = "float8_e4m3fn"
    return DeviceRecord(
        **described,
        **times,
        remote_row_bytes=num_bytes,
        dispatch_gbs=dispatch_gbs,
        combine_gbs=combine_gbs,
        dispatch_of_peak=share(dispatch_gbs, peaks.copy_engine_pull_gbs),
        combine_of_peak=share(combine_gbs, peaks.copy_engine_push_gbs),
        num_sms=_num_sms(ranks[0].profiles.get(variant, ())),
        kernel_us=ranks[0].kernel_us if variant == "fusco" else {},
        peaks={name: value for name, value in asdict(peaks).items() if name != "internode"},
    )


def _between_nodes(
    variant: str, workload: Workload, run: ShuffleRun, ranks: Sequence[DeviceResult], bound: int, emulation: str
) -> InternodeRecord:
    profiles = [rank.profiles[variant] for rank in ranks]
    rows_sent, empty, metadata = (
        [sum(getattr(of_calls[call], name) for of_calls in profiles) for call in (0, 1)]
        for name in ("internode_row_bytes", "internode_empty_bytes", "internode_metadata_bytes")
    )
    needed = rows_sent[0] - empty[0], rows_sent[1] - empty[1]
    described = describe_internode_bytes(variant, workload, run, _errors(variant, ranks), needed)
    internode = ranks[0].peaks.internode
    peaks = {name: round(value, 3) for name, value in asdict(internode).items()}
    bound_ms = described["busiest_rank_bytes"] / internode.best_gbs / 1e6
    times: dict[str, Any] = _slowest_times(variant, ranks)
    return InternodeRecord(
        **described,
        internode_row_bytes_lower_bound=bound,
        empty_bytes=empty[0],
        metadata_bytes=metadata[0],
        combine_metadata_bytes=metadata[1],
        internode_peak_gbs=round(internode.best_gbs, 3),
        **times,
        bound_ms=round(bound_ms, 4),
        dispatch_over_bound=round(times["dispatch_ms"] / bound_ms, 3) if bound_ms else None,
        combine_over_bound=round(times["combine_ms"] / bound_ms, 3) if bound_ms else None,
        num_sms=_num_sms(profiles[0]),
        peaks={"local_gbs": ranks[0].peaks.local_gbs, **peaks},
        emulation=emulation,
    )


def _num_sms(calls: Sequence[CallProfile]) -> dict[str, int]:
    """Return how many multiprocessors the dispatch and the combine of a variant took; empty if fusco made neither."""
    return {verb: call.num_sms for verb, call in zip(("dispatch", "combine"), calls, strict=False) if call.num_sms}


def _errors(variant: str, ranks: Sequence[DeviceResult]) -> list[str]:
    return [error for rank in ranks for error in rank.errors[variant]]


def _slowest_times(variant: str, ranks: Sequence[DeviceResult]) -> dict[str, float | None]:
    """Return the fields of ``DeviceTimes``, each the median over iterations of the slowest rank's."""
    of_ranks = [asdict(rank.times[variant]) for rank in ranks]
    slowest = {name: list(map(max, zip(*(times[name] for times in of_ranks), strict=True))) for name in of_ranks[0]}
    return {name: round(median(times), 4) if times else None for name, times in slowest.items()}
