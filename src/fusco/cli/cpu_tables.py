"""What ``fusco bench shuffle`` shows for the CPU: a column for each variant."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from fusco.bench.results import ShuffleRecord

_ROWS = (
    ("dispatch", "dispatch_ms", "ms"),
    ("combine", "combine_ms", "ms"),
    ("dispatch + combine", "total_ms", "ms"),
    ("  planning", "planning_ms", "ms"),
    ("  staging (copy into shared memory)", "staging_ms", "ms"),
    ("  wire (and what is fused into it)", "wire_ms", "ms"),
    ("  only rearranging", "rearranging_ms", "ms"),
    ("rows between nodes", "internode_row_bytes", "MB"),
    ("  lower bound", "internode_row_bytes_lower_bound", "MB"),
    ("  busiest rank", "busiest_rank_bytes", "MB"),
    ("rows within nodes", "intranode_row_bytes", "MB"),
    ("metadata between nodes", "metadata_bytes", "MB"),
)


def print_cpu_records(records: Sequence[ShuffleRecord], console: Console) -> None:
    """The variants of one workload side by side, and below them what the run looked like."""
    ours = records[0]
    by_name = {record.variant: record for record in records}
    has_ratio = {"fusco", "baseline"} <= set(by_name)
    title = (
        f"shuffle, {ours.traffic} traffic: {ours.nodes} nodes x {ours.ranks_per_node} ranks, {ours.tokens} tokens a "
        f"rank, hidden {ours.hidden}, top-{ours.num_topk} of {ours.num_experts}, {ours.dtype}, on {ours.device}"
    )
    table = Table(title=title, title_justify="left", caption="\n".join(_notes(ours)), caption_justify="left")
    table.add_column("")
    for name in (*by_name, *(["baseline / fusco"] if has_ratio else [])):
        table.add_column(name, justify="right")
    for label, name, unit in _ROWS:
        scale = 1.0 if unit == "ms" else 1e-6
        cells = [f"{getattr(record, name) * scale:,.2f} {unit}" for record in records]
        if has_ratio:
            fusco, baseline = (getattr(by_name[variant], name) for variant in ("fusco", "baseline"))
            cells.append(f"{baseline / fusco:.2f}" if fusco else "-")
        table.add_row(label, *cells, end_section=name == "rearranging_ms")
    table.add_row("verified", *("[green]yes[/]" if record.is_right else "[red]NO[/]" for record in records))
    console.print(table)


def _notes(record: ShuffleRecord) -> list[str]:
    num_ranks = record.nodes * record.ranks_per_node
    notes = [
        f"medians of {record.num_iterations} iterations, the slowest rank's time; bytes of one dispatch, all ranks",
        f"links, all {num_ranks} ranks at once: copy {record.copy_peak_gbs:.1f} GB/s a rank",
    ]
    if record.nodes > 1:
        share_s = record.internode_row_bytes / num_ranks / (record.internode_peak_gbs * 1e9)
        notes[-1] += f", between nodes {record.internode_peak_gbs:.2f} GB/s each way"
        notes.append(
            f"{record.variant}: dispatch's rows between nodes at that peak: {share_s * 1e3:.1f} ms, "
            f"{share_s * 1e3 / record.dispatch_ms:.0%} of the time dispatch took"
        )
    if record.trace:
        needed = record.tokens * num_ranks
        repeats = f"; repeated {record.trace_repeats:.2f} times for {needed} tokens" if record.trace_repeats > 1 else ""
        notes.append(f"trace: {record.trace}{repeats}")
    cores = record.hardware["num_cores"]
    notes.append(f"{record.hardware['cpu']}, {cores} cores; torch {record.versions['torch']}; commit {record.commit}")
    return notes
