"""Tables of ``fusco bench shuffle`` on the CPU: a column for each variant, or a row if there are many."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from fusco.bench.results import ShuffleRecord, gains_of
from fusco.cli.tables import describe_origin, new_table, verified_cell

# Name of a figure, its row with a column for each variant, its column with a row for each.
_FIGURES = (
    ("dispatch_ms", "dispatch", "dispatch\nms"),
    ("combine_ms", "combine", "combine\nms"),
    ("total_ms", "dispatch + combine", "both\nms"),
    ("bound_ms", "  bound of each, by the busiest rank", "bound of\neach, ms"),
    ("planning_ms", "  planning", "planning\nms"),
    ("staging_ms", "  staging (copy into shared memory)", ""),
    ("wire_ms", "  wire (and what is fused into it)", "wire\nms"),
    ("rearranging_ms", "  only rearranging", "only re-\narranging, ms"),
    ("internode_row_bytes", "rows between nodes", "between\nnodes, MB"),
    ("internode_row_bytes_lower_bound", "  lower bound", "lower\nbound, MB"),
    ("busiest_rank_bytes", "  busiest rank", "busiest\nrank, MB"),
    ("intranode_row_bytes", "rows within nodes", ""),
    ("lane_row_bytes", "  read to send them for others", ""),
    ("metadata_bytes", "metadata between nodes", ""),
)
_MAX_COLUMNS = 3


def print_cpu_records(records: Sequence[ShuffleRecord], console: Console) -> None:
    """Print the variants of one workload, and notes on the run; of batches of a prefill the gains."""
    first = records[0]
    if records[-1].batch:
        console.print(_gains(records))
        return
    title = (
        f"shuffle, {first.traffic} traffic: {first.nodes} nodes x {first.ranks_per_node} ranks, {first.tokens} tokens "
        f"a rank, hidden {first.hidden}, top-{first.num_topk} of {first.num_experts}, {first.dtype}, on {first.device}"
    )
    make = _with_row_each if len(records) > _MAX_COLUMNS else _with_column_each
    console.print(make(title, records, _notes(first)))


def _gains(records: Sequence[ShuffleRecord]) -> Table:
    first, num_batches = records[0], records[-1].batch + 1
    title = (
        f"{first.traffic} prefills, {num_batches} batches: {first.nodes} nodes x {first.ranks_per_node} ranks, at most "
        f"{first.tokens} tokens a rank, hidden {first.hidden}; gain of {first.variant}: a variant's time over its time"
    )
    table = new_table(
        title,
        ("", "median", "P99", "rows of the busiest rank: median", "P99"),
        [describe_origin(first, first.nodes * first.ranks_per_node)],
    )
    for gain in gains_of(records):
        figures = (gain.median, gain.p99, gain.rows_median, gain.rows_p99)
        table.add_row(gain.variant, *(f"{figure:.3f}" for figure in figures))
    table.add_row("verified", verified_cell(all(record.is_right for record in records)), "", "", "")
    return table


def _with_column_each(title: str, records: Sequence[ShuffleRecord], notes: Sequence[str]) -> Table:
    by_name = {record.variant: record for record in records}
    has_ratio = {"fusco", "baseline"} <= set(by_name)
    table = new_table(title, ("", *by_name, *(["baseline / fusco"] if has_ratio else [])), notes)
    for name, label, _ in _FIGURES:
        if name == "bound_ms" and not records[0].bound_ms:
            continue
        cells = [f"{_value(record, name)} {'ms' if name.endswith('_ms') else 'MB'}" for record in records]
        if has_ratio:
            fusco, baseline = (getattr(by_name[variant], name) for variant in ("fusco", "baseline"))
            cells.append(f"{baseline / fusco:.2f}" if fusco else "-")
        table.add_row(label, *cells, end_section=name == "rearranging_ms")
    table.add_row("verified", *(verified_cell(record.is_right) for record in records))
    return table


def _with_row_each(title: str, records: Sequence[ShuffleRecord], notes: Sequence[str]) -> Table:
    table = new_table(title, ("", *(heading for _, _, heading in _FIGURES if heading), "verified"), notes)
    for record in records:
        cells = (_value(record, name) for name, _, heading in _FIGURES if heading)
        table.add_row(record.variant, *cells, verified_cell(record.is_right))
    return table


def _value(record: ShuffleRecord, name: str) -> str:
    return f"{getattr(record, name) * (1.0 if name.endswith('_ms') else 1e-6):,.2f}"


def _notes(record: ShuffleRecord) -> list[str]:
    num_ranks = record.nodes * record.ranks_per_node
    notes = [
        f"medians of {record.num_iterations} iterations, the slowest rank's time; bytes of one dispatch, all ranks",
        f"links, all {num_ranks} ranks sending at once: copy {record.copy_peak_gbs:.1f} GB/s a rank",
    ]
    if record.nodes > 1:
        share_s = record.internode_row_bytes / num_ranks / (record.internode_peak_gbs * 1e9)
        notes[-1] += f", between nodes {record.internode_peak_gbs:.2f} GB/s in each direction"
        notes.append(
            f"{record.variant}: dispatch's rows between nodes at that peak: {share_s * 1e3:.1f} ms, "
            f"{share_s * 1e3 / record.dispatch_ms:.0%} of the time dispatch took"
        )
    if record.bound_ms:
        others = f"other processes took {record.other_cores_share:.0%} of the cores' time"
        notes.append(
            f"testbed: bound is the busiest rank's bytes at the rate of its rails; {record.variant}: dispatch takes "
            f"{record.dispatch_ms / record.bound_ms:.2f} times as long, combine "
            f"{record.combine_ms / record.bound_ms:.2f}; {others}"
        )
    if record.trace:
        needed = record.tokens * num_ranks
        repeats = f"; repeated {record.trace_repeats:.2f} times for {needed} tokens" if record.trace_repeats > 1 else ""
        notes.append(f"trace: {record.trace}{repeats}")
    return [*notes, describe_origin(record, num_ranks)]
