"""Records made of all ranks' measurements, and the rows that each variant must send between nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import cached_property
from statistics import median
from typing import Any, TypeVar

import numpy as np

from fusco.bench.harness.environment import record_of
from fusco.bench.harness.stopwatch import others_share, slowest_median
from fusco.bench.inputs.matrices import rows_of_routing
from fusco.bench.inputs.traffic import Workload, internode_rows_lower_bound
from fusco.bench.shuffle.no_engine import expand
from fusco.bench.shuffle.records import DeviceRecord, InternodeRecord, ShuffleRecord, VariantRecord
from fusco.bench.shuffle.run import ShuffleRun
from fusco.bench.shuffle.variants import balancer_of, has_fixed_messages, is_of_caller
from fusco.core.lanes import IntArray
from fusco.core.profile import CallProfile
from fusco.planner.balancer import BALANCERS
from fusco.planner.dispatch_plan import select_tokens
from fusco.planner.traffic import Traffic

_Record = TypeVar("_Record", bound=VariantRecord)


def summarize(run: ShuffleRun, ranks: Sequence[Sequence[Any]], emulation: str = "") -> list[Any]:
    """Return one record for each workload and variant that was measured, from all ranks' results.

    Of ``RankResult`` on the CPU a ``ShuffleRecord``; of ``DeviceResult`` a ``DeviceRecord``, or between nodes an
    ``InternodeRecord``, a field of which is ``emulation``.
    """
    records: list[Any] = []
    for workload, *of_ranks in zip(run.workloads, *ranks, strict=True):
        summary = _Summary(run, workload, of_ranks)
        for variant in of_ranks[0].errors:
            if run.device == "cpu":
                records.append(summary.on_cpu(variant))
            elif run.has_nodes:
                records.append(summary.between_nodes(variant, emulation))
            else:
                records.append(summary.within_node(variant))
    return records


class _Summary:
    """All ranks' results with one workload."""

    def __init__(self, run: ShuffleRun, workload: Workload, ranks: Sequence[Any]) -> None:
        self._run, self._workload, self._ranks = run, workload, ranks

    @cached_property
    def _bound_bytes(self) -> int:
        return internode_rows_lower_bound(self._workload) * self._workload.bytes_per_token

    def on_cpu(self, variant: str) -> ShuffleRecord:
        run, ranks = self._run, self._ranks
        per_rank = [rank.iterations[variant] for rank in ranks]

        def milliseconds(*parts: Callable[[Any], float]) -> float:
            """Return the median over iterations of the sum of each part's slowest rank."""
            iterations = zip(*per_rank, strict=True)
            return round(median(sum(max(map(part, of)) for part in parts) for of in iterations) * 1e3, 3)

        def both(name: str) -> float:
            return milliseconds(lambda it: float(getattr(it.dispatch, name)) + float(getattr(it.combine, name)))

        def num_bytes(call: str, kind: str) -> int:
            return sum(getattr(getattr(iterations[-1], call), f"{kind}_bytes") for iterations in per_rank)

        sent = self._internode_bytes(variant, *(num_bytes(call, "internode_row") for call in ("dispatch", "combine")))
        return self._record(
            ShuffleRecord,
            variant,
            **sent,
            dispatch_ms=milliseconds(lambda it: it.dispatch_s),
            combine_ms=milliseconds(lambda it: it.combine_s),
            total_ms=milliseconds(lambda it: it.dispatch_s, lambda it: it.combine_s),
            bound_ms=round(sent["busiest_rank_bytes"] / run.rank_gbs / 1e6, 3) if run.rank_gbs else 0.0,
            other_cores_share=others_share([[it.cores for it in rank] for rank in per_rank]) if run.rank_gbs else 0.0,
            **{f"{part}_ms": both(f"{part}_s") for part in ("planning", "staging", "wire", "rearranging")},
            **{f"{kind}_bytes": num_bytes("dispatch", kind) for kind in ("intranode_row", "lane_row")},
            metadata_bytes=num_bytes("dispatch", "internode_metadata"),
            internode_peak_gbs=round(ranks[0].links.internode.best_gbs, 3),
            copy_peak_gbs=round(median(rank.links.copy_gbs for rank in ranks), 3),
        )

    def within_node(self, variant: str) -> DeviceRecord:
        def share(rate: float | None, peak: float) -> float | None:
            return round(rate / peak, 3) if rate and peak else None

        ranks, workload, times = self._ranks, self._workload, self._slowest_times(variant)
        peaks = ranks[0].peaks
        num_bytes = max(rank.remote_row_bytes for rank in ranks)
        is_fp8 = variant == "fusco-fp8"
        if is_fp8:  # a byte for each value, and a float32 scale for each block
            num_bytes = num_bytes // workload.bytes_per_token * (workload.hidden + 4 * -(-workload.hidden // 128))
        gbs = {
            verb: round(num_bytes / 1e6 / ms, 1) if (ms := times[f"{verb}_ms"]) else None
            for verb in ("dispatch", "combine")
        }
        return self._record(
            DeviceRecord,
            variant,
            **({"dtype": "float8_e4m3fn"} if is_fp8 else {}),
            **times,
            remote_row_bytes=num_bytes,
            **{f"{verb}_gbs": rate for verb, rate in gbs.items()},
            dispatch_of_peak=share(gbs["dispatch"], peaks.copy_engine_pull_gbs),
            combine_of_peak=share(gbs["combine"], peaks.copy_engine_push_gbs),
            num_sms=_num_sms(ranks[0].profiles.get(variant, ())),
            kernel_us=ranks[0].kernel_us if variant == "fusco" else {},
            peaks={name: value for name, value in asdict(peaks).items() if name != "internode"},
        )

    def between_nodes(self, variant: str, emulation: str) -> InternodeRecord:
        profiles, peaks = [rank.profiles[variant] for rank in self._ranks], self._ranks[0].peaks
        rows, empty, metadata = (
            [sum(getattr(of_calls[call], f"internode_{kind}_bytes") for of_calls in profiles) for call in (0, 1)]
            for kind in ("row", "empty", "metadata")
        )
        sent = self._internode_bytes(variant, rows[0] - empty[0], rows[1] - empty[1])
        bound_ms, times = sent["busiest_rank_bytes"] / peaks.internode.best_gbs / 1e6, self._slowest_times(variant)
        over_bound = {
            f"{verb}_over_bound": round((times[f"{verb}_ms"] or 0.0) / bound_ms, 3) if bound_ms else None
            for verb in ("dispatch", "combine")
        }
        return self._record(
            InternodeRecord,
            variant,
            **sent,
            empty_bytes=empty[0],
            metadata_bytes=metadata[0],
            combine_metadata_bytes=metadata[1],
            internode_peak_gbs=round(peaks.internode.best_gbs, 3),
            **times,
            bound_ms=round(bound_ms, 4),
            **over_bound,
            num_sms=_num_sms(profiles[0]),
            peaks={
                "local_gbs": peaks.local_gbs,
                **{name: round(value, 3) for name, value in asdict(peaks.internode).items()},
            },
            emulation=emulation,
        )

    def _record(self, kind: type[_Record], variant: str, **values: Any) -> _Record:
        load, run = self._workload, self._run
        values["errors"] = errors = [
            *(error for rank in self._ranks for error in rank.errors[variant]),
            *values.get("errors", ()),
        ]
        described = {
            "traffic": load.pattern,
            "nodes": load.topology.num_nodes,
            "batch": load.batch.number if load.batch else 0,
            "all_tokens": sum(map(load.num_tokens, range(load.topology.world_size))),
            "dtype": str(load.dtype).removeprefix("torch."),
            "verified": not errors,
            "trace": load.trace.name if load.trace else "",
            "trace_repeats": round(load.num_repeats, 3),
        }
        sources = (load, load.placement, load.topology, run)
        return record_of(kind, *sources, variant=variant, **{**described, **values})

    def _internode_bytes(self, variant: str, dispatched: int, combined: int) -> dict[str, Any]:
        """Return fields of an ``InternodeBytesRecord``, and the errors if other bytes of rows than planned were sent.

        ``dispatched`` and ``combined`` are those that all ranks sent between nodes.
        """
        load, run = self._workload, self._run
        rows = internode_rows(variant, load, run.balancer, run.device)
        planned = int(rows.sum()) * load.bytes_per_token
        return {
            "balancer": balancer_of(variant, run.balancer, run.device),
            "internode_row_bytes": dispatched,
            "combine_internode_row_bytes": combined,
            "internode_row_bytes_lower_bound": self._bound_bytes,
            "busiest_rank_bytes": busiest_rows(rows) * load.bytes_per_token,
            "errors": [
                f"{operation} sent {seen} bytes of rows between nodes, its plan requires {planned}"
                for operation, seen in (("dispatch", dispatched), ("combine", combined))
                if seen != planned
            ],
        }

    def _slowest_times(self, variant: str) -> dict[str, float | None]:
        """Return the fields of ``DeviceTimes``, each the median over iterations of the slowest rank's."""
        of_ranks = [asdict(rank.times[variant]) for rank in self._ranks]
        per_field = {name: [times[name] for times in of_ranks] for name in of_ranks[0]}
        return {name: slowest_median(of_field, 4) if of_field[0] else None for name, of_field in per_field.items()}


def _num_sms(calls: Sequence[CallProfile]) -> dict[str, int]:
    """Return how many SMs the dispatch and the combine of a variant took; empty if fusco made neither."""
    return {verb: call.num_sms for verb, call in zip(("dispatch", "combine"), calls, strict=False) if call.num_sms}


def internode_rows(variant: str, workload: Workload, balancer: str, device: str = "cpu") -> IntArray:
    """Return the rows that each rank sends to each rank of another node in a dispatch, int64 (world_size, world_size).

    A combine sends as many in the other direction. ``balancer`` is the run's, a name of ``fusco.BALANCERS``; some
    variants use another one, or none. What a variant of the caller sends is not known: zeros.
    """
    if is_of_caller(variant):
        return np.zeros([workload.topology.world_size] * 2, np.int64)
    if variant == "baseline":
        node = np.array(workload.topology.rank_to_node)
        return np.where(node[:, None] != node, rows_of_routing(workload), 0)
    if has_fixed_messages(variant, device):
        return _forwarded([[workload.tokens] * workload.topology.num_nodes] * workload.topology.world_size, workload)
    counts = []
    for rank in range(workload.topology.world_size):
        routing = workload.routing(rank)
        if variant == "no-planner":  # a copy for each rank of a node
            routing = expand(routing, workload.placement).routing
        counts.append(select_tokens(routing.topk_idx, workload.placement, workload.topology).num_tokens_to_node)
    return _forwarded(counts, workload, balancer_of(variant, balancer, device))


def busiest_rows(rank_to_rank: IntArray) -> int:
    """Return the maximum number of rows that any rank sends or any rank receives.

    A rank's links carry both directions at once, so the larger of the two bounds its time, and the busiest rank's
    bounds the time of all. A combine sends what a dispatch receives: its figure is the same.

    >>> busiest_rows(np.array([[0, 3], [5, 0]])), busiest_rows(np.array([[0, 0, 4], [0, 0, 4], [1, 0, 0]]))
    (5, 8)
    """
    return int(max(rank_to_rank.sum(axis=0).max(), rank_to_rank.sum(axis=1).max()))


def _forwarded(counts: Sequence[Sequence[int]], workload: Workload, balancer: str = "static") -> IntArray:
    """Return the rows to each forwarder, from each carrier, if rank ``r`` has ``counts[r][n]`` rows for node ``n``."""
    traffic = Traffic.from_counts(workload.topology, counts)
    return traffic.lanes_of(BALANCERS[balancer](traffic)).rank_to_rank


def num_copies(workload: Workload) -> int:
    """Return the maximum number of tokens of any rank, if each (token, rank that needs it) counts as a token."""
    ranks = range(workload.topology.world_size)
    return max(len(expand(workload.routing(rank), workload.placement).copy_to_token) for rank in ranks)
