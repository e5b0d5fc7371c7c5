"""From what ranks measured to one record for each variant, as it is printed and written."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from fusco.bench.environment import commit, hardware, versions
from fusco.bench.shuffle import Iteration, RankResult
from fusco.bench.traffic import Workload, internode_rows_lower_bound

if TYPE_CHECKING:
    from _typeshed import DataclassInstance  # exists for type checkers only


@dataclass(frozen=True, kw_only=True)
class ShuffleRecord:
    """One variant's line. Times in milliseconds: medians over iterations of the slowest rank's.

    Bytes are sums over all ranks of one dispatch, unless they say combine. ``internode_row_bytes_lower_bound`` is the
    distinct (token, remote node) pairs times the size of a row. ``wire_ms`` includes what is fused into the transfer;
    planning, staging, wire and rearranging are each the slowest rank's, of dispatch and combine together, so that they
    need not add up to ``total_ms``.
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
    balancer: str
    verified: bool
    dispatch_ms: float
    combine_ms: float
    total_ms: float
    planning_ms: float
    staging_ms: float
    wire_ms: float
    rearranging_ms: float
    internode_row_bytes: int
    internode_row_bytes_lower_bound: int
    combine_internode_row_bytes: int
    intranode_row_bytes: int
    metadata_bytes: int
    internode_peak_gbs: float
    copy_peak_gbs: float
    num_iterations: int
    trace: str
    trace_repeats: float
    versions: dict[str, str]
    hardware: dict[str, str | int | float]
    commit: str
    errors: list[str]


def summarize(workload: Workload, balancer: str, ranks: Sequence[RankResult]) -> list[ShuffleRecord]:
    """One record for each variant, from all ranks' results."""
    bound = internode_rows_lower_bound(workload) * workload.bytes_per_token
    return [_summarize_variant(variant, workload, balancer, ranks, bound) for variant in ranks[0].iterations]


def write_json_lines(records: Sequence[DataclassInstance], path: Path) -> None:
    """Write records (dataclasses), one JSON object a line."""
    path.write_text("".join(json.dumps(asdict(record)) + "\n" for record in records), encoding="utf-8")


def _summarize_variant(
    variant: str, workload: Workload, balancer: str, ranks: Sequence[RankResult], bound: int
) -> ShuffleRecord:
    per_rank = [rank.iterations[variant] for rank in ranks]

    def milliseconds(of: Callable[[Iteration], float]) -> float:
        return round(median(max(map(of, at_once)) for at_once in zip(*per_rank, strict=True)) * 1e3, 3)

    def both(name: str) -> float:
        return milliseconds(lambda it: float(getattr(it.dispatch, name)) + float(getattr(it.combine, name)))

    last = [iterations[-1] for iterations in per_rank]
    errors = [error for rank in ranks for error in rank.errors[variant]]
    return ShuffleRecord(
        variant=variant,
        traffic=workload.pattern.value,
        nodes=workload.topology.num_nodes,
        ranks_per_node=workload.topology.ranks_per_node,
        tokens=workload.tokens,
        hidden=workload.hidden,
        num_experts=workload.placement.num_experts,
        num_topk=workload.num_topk,
        dtype=str(workload.dtype).removeprefix("torch."),
        device="cpu",
        balancer=balancer if variant == "fusco" else "none",
        verified=not errors,
        dispatch_ms=milliseconds(lambda it: it.dispatch_s),
        combine_ms=milliseconds(lambda it: it.combine_s),
        total_ms=milliseconds(lambda it: it.dispatch_s + it.combine_s),
        planning_ms=both("planning_s"),
        staging_ms=both("staging_s"),
        wire_ms=both("wire_s"),
        rearranging_ms=both("rearranging_s"),
        internode_row_bytes=sum(it.dispatch.internode_row_bytes for it in last),
        internode_row_bytes_lower_bound=bound,
        combine_internode_row_bytes=sum(it.combine.internode_row_bytes for it in last),
        intranode_row_bytes=sum(it.dispatch.intranode_row_bytes for it in last),
        metadata_bytes=sum(it.dispatch.internode_metadata_bytes for it in last),
        internode_peak_gbs=round(median(rank.links.internode_gbs for rank in ranks), 3),
        copy_peak_gbs=round(median(rank.links.copy_gbs for rank in ranks), 3),
        num_iterations=len(per_rank[0]),
        trace=workload.trace.name if workload.trace else "",
        trace_repeats=round(workload.num_repeats, 3),
        versions=versions(),
        hardware=hardware(),
        commit=commit(),
        errors=errors,
    )
