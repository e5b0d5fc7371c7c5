"""One record for each variant, made of all ranks' measurements, as it is printed and written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from fusco.bench.harness.environment import Measurement, hardware
from fusco.bench.harness.stopwatch import others_share
from fusco.bench.inputs.traffic import Workload, internode_rows_lower_bound
from fusco.bench.shuffle.internode_bytes import busiest_rows, internode_rows
from fusco.bench.shuffle.ranks import Iteration, RankResult
from fusco.bench.shuffle.run import ShuffleRun
from fusco.bench.shuffle.variants import DEDUPLICATED, balancer_of, has_fixed_messages


@dataclass(frozen=True, kw_only=True)
class VariantRecord(Measurement):
    """Fields of every line: the variant, the workload, the environment. ``trace_repeats`` is 0 without a trace.

    Several records have the same traffic if it is of batches of a prefill: ``batch`` is their number. Their ``tokens``
    are the most of a rank, ``all_tokens`` those of all ranks.
    """

    variant: str
    traffic: str
    nodes: int
    ranks_per_node: int
    batch: int
    tokens: int
    all_tokens: int
    hidden: int
    num_experts: int
    num_topk: int
    dtype: str
    device: str
    verified: bool
    num_iterations: int
    trace: str
    trace_repeats: float
    errors: list[str]


@dataclass(frozen=True, kw_only=True)
class InternodeBytesRecord(VariantRecord):
    """A variant's line with what it sent between nodes.

    Bytes are sums over all ranks of one dispatch, unless they say combine. ``internode_row_bytes_lower_bound`` is the
    distinct (token, remote node) pairs times the size of a row. ``busiest_rank_bytes`` is the maximum that any rank
    sends or any rank receives, in a dispatch as in a combine.
    """

    balancer: str
    internode_row_bytes: int
    combine_internode_row_bytes: int
    internode_row_bytes_lower_bound: int
    metadata_bytes: int
    busiest_rank_bytes: int
    internode_peak_gbs: float

    @property
    def is_right(self) -> bool:
        """Verified, and a variant that sends one copy for each node sends no unneeded row."""
        sent = {self.internode_row_bytes, self.combine_internode_row_bytes}
        may_send_more = self.variant not in DEDUPLICATED or has_fixed_messages(self.variant, self.device)
        is_minimal = may_send_more or sent == {self.internode_row_bytes_lower_bound}
        return self.verified and is_minimal


@dataclass(frozen=True, kw_only=True)
class ShuffleRecord(InternodeBytesRecord):
    """One variant's line on the CPU. Times in milliseconds: medians over iterations of the slowest rank's.

    ``total_ms`` is the slowest rank's dispatch plus the slowest rank's combine, which may be another rank: between them
    all ranks wait for each other. ``wire_ms`` includes what is fused into the transfer; planning, staging, wire and
    rearranging are each the slowest rank's, of dispatch and combine together, so they need not add up to ``total_ms``.
    On a testbed, ``bound_ms`` is the time of ``busiest_rank_bytes`` at the rate of a rank's rails; elsewhere 0.
    ``other_cores_share`` is the share of the cores' time that other processes took meanwhile. It is known where one
    machine has all ranks, on a testbed; elsewhere it is 0.
    """

    dispatch_ms: float
    combine_ms: float
    bound_ms: float
    other_cores_share: float
    total_ms: float
    planning_ms: float
    staging_ms: float
    wire_ms: float
    rearranging_ms: float
    intranode_row_bytes: int
    lane_row_bytes: int
    copy_peak_gbs: float


@dataclass(frozen=True)
class Gain:
    """Ratio of a variant to the first one, in the same batches: of the time and of the busiest rank's rows."""

    variant: str
    median: float
    p99: float
    rows_median: float
    rows_p99: float


def gains_of(records: Sequence[ShuffleRecord]) -> list[Gain]:
    """Return the gain over each other variant; ``records`` have the same variants in each batch."""
    times: dict[str, list[float]] = {}
    rows: dict[str, list[float]] = {}
    for record in records:
        times.setdefault(record.variant, []).append(record.total_ms)
        rows.setdefault(record.variant, []).append(record.busiest_rank_bytes)
    first, *others = times
    gains = []
    for name in others:
        ratios = [np.divide(of[name], of[first]) for of in (times, rows)]
        figures = [float(figure) for ratio in ratios for figure in (np.median(ratio), np.quantile(ratio, 0.99))]
        gains.append(Gain(name, *figures))
    return gains


def summarize(run: ShuffleRun, ranks: Sequence[Sequence[RankResult]]) -> list[ShuffleRecord]:
    """Return one record for each workload and variant, from all ranks' results."""
    records = []
    for workload, *of_ranks in zip(run.workloads, *ranks, strict=True):
        bound = internode_rows_lower_bound(workload) * workload.bytes_per_token
        records += [_summarize_variant(variant, workload, run, of_ranks, bound) for variant in run.variants]
    return records


def describe_variant(variant: str, workload: Workload, run: ShuffleRun, errors: list[str]) -> dict[str, Any]:
    """Return the fields of a ``VariantRecord``."""
    return {
        "variant": variant,
        "traffic": workload.pattern,
        "nodes": workload.topology.num_nodes,
        "ranks_per_node": workload.topology.ranks_per_node,
        "batch": workload.batch.number if workload.batch else 0,
        "tokens": workload.tokens,
        "all_tokens": sum(map(workload.num_tokens, range(workload.topology.world_size))),
        "hidden": workload.hidden,
        "num_experts": workload.placement.num_experts,
        "num_topk": workload.num_topk,
        "dtype": str(workload.dtype).removeprefix("torch."),
        "device": run.device,
        "verified": not errors,
        "num_iterations": run.num_iterations,
        "trace": workload.trace.name if workload.trace else "",
        "trace_repeats": round(workload.num_repeats, 3),
        "hardware": hardware(run.device),
        "errors": errors,
    }


def describe_internode_bytes(
    variant: str, workload: Workload, run: ShuffleRun, errors: list[str], bytes_sent: tuple[int, int]
) -> dict[str, Any]:
    """Return the fields of an ``InternodeBytesRecord`` except the lower bound, the metadata and the peak.

    ``bytes_sent`` are the bytes of rows that all ranks sent between nodes in a dispatch and in a combine. If they are
    not what the routing requires of the variant, that is an error.
    """
    rows = internode_rows(variant, workload, run.balancer, run.device)
    expected = int(rows.sum()) * workload.bytes_per_token
    for operation, seen in zip(("dispatch", "combine"), bytes_sent, strict=True):
        if seen != expected:
            errors = [*errors, f"{operation} sent {seen} bytes of rows between nodes, its plan requires {expected}"]
    return {
        **describe_variant(variant, workload, run, errors),
        "balancer": balancer_of(variant, run.balancer, run.device),
        "internode_row_bytes": bytes_sent[0],
        "combine_internode_row_bytes": bytes_sent[1],
        "busiest_rank_bytes": busiest_rows(rows) * workload.bytes_per_token,
    }


def _summarize_variant(
    variant: str, workload: Workload, run: ShuffleRun, ranks: Sequence[RankResult], bound: int
) -> ShuffleRecord:
    per_rank = [rank.iterations[variant] for rank in ranks]

    def milliseconds(*parts: Callable[[Iteration], float]) -> float:
        """Return the median over iterations of the sum of each part's slowest rank."""
        iterations = zip(*per_rank, strict=True)
        return round(median(sum(max(map(part, ranks)) for part in parts) for ranks in iterations) * 1e3, 3)

    def both(name: str) -> float:
        return milliseconds(lambda it: float(getattr(it.dispatch, name)) + float(getattr(it.combine, name)))

    last = [iterations[-1] for iterations in per_rank]
    errors = [error for rank in ranks for error in rank.errors[variant]]
    bytes_sent = (
        sum(it.dispatch.internode_row_bytes for it in last),
        sum(it.combine.internode_row_bytes for it in last),
    )
    described = describe_internode_bytes(variant, workload, run, errors, bytes_sent)
    return ShuffleRecord(
        **described,
        dispatch_ms=milliseconds(lambda it: it.dispatch_s),
        combine_ms=milliseconds(lambda it: it.combine_s),
        total_ms=milliseconds(lambda it: it.dispatch_s, lambda it: it.combine_s),
        bound_ms=round(described["busiest_rank_bytes"] / run.rank_gbs / 1e6, 3) if run.rank_gbs else 0.0,
        other_cores_share=others_share([[it.cores for it in rank] for rank in per_rank]) if run.rank_gbs else 0.0,
        planning_ms=both("planning_s"),
        staging_ms=both("staging_s"),
        wire_ms=both("wire_s"),
        rearranging_ms=both("rearranging_s"),
        internode_row_bytes_lower_bound=bound,
        intranode_row_bytes=sum(it.dispatch.intranode_row_bytes for it in last),
        lane_row_bytes=sum(it.dispatch.lane_row_bytes for it in last),
        metadata_bytes=sum(it.dispatch.internode_metadata_bytes for it in last),
        internode_peak_gbs=round(ranks[0].links.internode.best_gbs, 3),
        copy_peak_gbs=round(median(rank.links.copy_gbs for rank in ranks), 3),
    )
