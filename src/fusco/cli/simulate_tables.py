"""Tables of ``fusco simulate``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from fusco.cli.reports import Comparison
from fusco.cli.tables import ResultTable
from fusco.core.timeline import Span, write_chrome_trace

if TYPE_CHECKING:
    from fusco.bench.simulation.papers import PaperRow
    from fusco.simulate.cluster import Cluster
    from fusco.simulate.demand import Demand
    from fusco.simulate.result import SimulationResult

_NOTE = "[dim]predictions of a model: docs/simulation.md has its errors[/]"


def table_of_results(results: Sequence[SimulationResult]) -> ResultTable:
    """Return a table with a row for each system and size: dispatch, combine, what binds."""
    one = results[0]
    traffic = one.traffic if len({each.traffic for each in results}) == 1 else one.traffic.partition(" ")[0]
    title = f"predicted on {one.cluster}: {traffic}; {one.bytes_per_row:,} bytes a row; ms"
    names = ("system", "nodes x ranks", "tokens")
    has_skew = len({each.skew for each in results}) > 1
    skews = ("skew",) if has_skew else ()
    columns = (*names, *skews, "dispatch", "combine", "both", "busiest link alone", "tier", "busiest link")
    table = ResultTable(title, columns, (_NOTE,), left=(*names, "tier", "busiest link"))
    for dispatch, combine in zip(results[::2], results[1::2], strict=True):
        shape = [f"{dispatch.nodes} x {dispatch.ranks_per_node}", f"{dispatch.tokens:,}"]
        shape += [f"{dispatch.skew:g}"] if has_skew else []
        both = dispatch.makespan_ms + combine.makespan_ms
        times = [f"{each:.3f}" for each in (dispatch.makespan_ms, combine.makespan_ms, both, dispatch.bound_ms)]
        table.add_row(dispatch.system, *shape, *times, dispatch.tier, dispatch.binds)
    return table


def compare_systems(results: Sequence[SimulationResult]) -> list[Comparison]:
    """Compare the first system with the others, in each case."""
    first, cases = results[0].system, dict[str, dict[str, float]]()
    for dispatch, combine in zip(results[::2], results[1::2], strict=True):
        skew = "" if dispatch.skew is None else f", skew {dispatch.skew:g}"
        name = f"{dispatch.nodes} x {dispatch.ranks_per_node} ranks, {dispatch.tokens:,} tokens{skew}"
        if dispatch.system == first or not dispatch.system.startswith("no-"):  # without parts of fusco it is no rival
            cases.setdefault(name, {})[dispatch.system] = dispatch.makespan_ms + combine.makespan_ms
    return [Comparison(name, first, times, "predicted") for name, times in cases.items()]


def print_gains(
    cluster: Cluster,
    demand: Demand,
    results: Sequence[SimulationResult],
    tier: Any,
    expert_bytes: int,
    console: Console,
) -> None:
    """Print what binds the first system's calls, ``results``, and what each part of fusco brings."""
    from fusco.simulate.advice import defaults_used, describe_binding, gain_of_replicas, gains_of_parts

    for result in results:
        console.print(f"what binds {result.call} of {result.system}: {describe_binding(result)}")
    if defaults := defaults_used(results[0]):
        console.print(f"not given for {cluster.name}, so defaults: {', '.join(defaults)}")
    if demand.topology.num_nodes > 1:
        copies = results[0].copies
        each_way = f"{copies.needed:,} with a copy for each expert, {copies.bound:,} with one for each node"
        console.print(f"rows between nodes: {each_way}")
        table = ResultTable(
            "what each part brings, dispatch and combine, ms", ("part", "without", "with", "gain"), left=("part",)
        )
        for each in gains_of_parts(cluster, demand, tier):
            table.add_row(each.part, f"{each.without_ms:.3f}", f"{each.with_ms:.3f}", f"{each.gain:.2f} x")
        console.print(table)
    if replicas := gain_of_replicas(cluster, demand, expert_bytes):
        copies_of = f"{replicas.num_copies} cop{'y' if replicas.num_copies == 1 else 'ies'}"
        at, where = replicas.break_even_tokens, "within" if replicas.within_node else "between"
        console.print(
            f"replicas, a spare place for each rank: {copies_of}, busiest rank over mean "
            f"{replicas.busiest_over_mean_before:.2f} to {replicas.busiest_over_mean:.2f}; saves "
            f"{replicas.saved_ms:.3f} ms of products, weights take {replicas.weights_ms:.3f} ms {where} nodes; "
            + (f"break-even at {at:,} tokens of all ranks" if at else "copies save nothing")
        )


def table_of_papers(rows: Sequence[PaperRow]) -> ResultTable:
    """Return published results beside predictions; rows that constants were trained on are grey."""
    columns = ("result", "source", "unit", "published", "predicted", "error", "role")
    notes = ("[dim]grey: a constant was trained on it; ranges are represented by their middle[/]",)
    table = ResultTable("published results and predictions", columns, notes, left=("result", "source", "unit", "role"))
    for row in rows:
        cells = (
            row.label,
            row.where,
            row.unit,
            f"{row.measured:g}",
            f"{row.predicted:.2f}",
            f"{row.error:+.1f} %",
            row.role,
        )
        table.add_row(*(f"[dim]{cell}[/]" if row.role == "train" else cell for cell in cells))
    return table


def write_timeline(result: SimulationResult, path: Path) -> None:
    """Write the spans of a result's ranks in Chrome's trace format."""
    spans: list[list[Span]] = [[] for _ in range(result.ranks)]
    for each in result.spans:
        begin_us, end_us = each.start_ms * 1e3, each.end_ms * 1e3
        spans[each.rank].append(Span(each.name, each.name, begin_us, end_us - begin_us))
    write_chrome_trace(path, spans, {"what": result.title, "tier": result.tier})
