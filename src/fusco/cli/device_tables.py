"""What ``fusco bench shuffle --device cuda`` shows, within a node and between nodes: a row for each variant."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

from fusco.cli.origin import describe_origin

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from fusco.bench.device_results import DeviceRecord, InternodeRecord
    from fusco.bench.results import VariantRecord


def print_device_records(records: Sequence[DeviceRecord], console: Console) -> None:
    """A row for each variant, and below it what the run looked like."""
    ours = records[0]
    table, baseline_ms = _table(ours, f"{ours.ranks_per_node} GPUs", _notes(records)), _baseline_ms(records)
    columns = ("dispatch", "combine", "both", "baseline / it", "dispatch", "of peak", "combine", "of peak", "verified")
    table.add_column("ms, and GB/s of rows")
    for name in columns:
        table.add_column(name, justify="right")
    for record in records:
        ratio = f"{baseline_ms / record.total_ms:.2f}" if baseline_ms and record.total_ms else "-"
        table.add_row(
            record.variant,
            *(_number(time_ms, ".3f") for time_ms in (record.dispatch_ms, record.combine_ms, record.total_ms)),
            ratio,
            _number(record.dispatch_gbs, ".0f"),
            _number(record.dispatch_of_peak, ".0%"),
            _number(record.combine_gbs, ".0f"),
            _number(record.combine_of_peak, ".0%"),
            "[green]yes[/]" if record.verified else "[red]NO[/]",
        )
    console.print(table)


def print_internode_records(records: Sequence[InternodeRecord], console: Console) -> None:
    """The same between nodes: times, what crosses, and both against the network's peak of the same run."""
    ours = records[0]
    table = _table(ours, f"{ours.nodes} nodes x {ours.ranks_per_node} GPUs", _internode_notes(records))
    baseline_ms = _baseline_ms(records)
    table.add_column("")
    for name in ("dispatch\nms", "combine\nms", "both\nms", "baseline\n/ it", "all ranks\nMB", "lower\nbound, MB"):
        table.add_column(name, justify="right")
    for name in ("busiest\nMB", "its time at\nthe peak, ms", "dispatch\n/ that", "combine\n/ that", "verified"):
        table.add_column(name, justify="right")
    for record in records:
        table.add_row(
            record.variant,
            *(f"{time_ms:.3f}" for time_ms in (record.dispatch_ms, record.combine_ms, record.total_ms)),
            f"{baseline_ms / record.total_ms:.2f}" if baseline_ms else "-",
            f"{record.internode_row_bytes / 1e6:,.1f}",
            f"{record.internode_row_bytes_lower_bound / 1e6:,.1f}",
            f"{record.busiest_rank_bytes / 1e6:,.1f}",
            f"{record.bound_ms:.3f}",
            _number(record.dispatch_over_bound, ".2f"),
            _number(record.combine_over_bound, ".2f"),
            "[green]yes[/]" if record.is_right else "[red]NO[/]",
        )
    console.print(table)


def _table(record: VariantRecord, where: str, notes: Sequence[str]) -> Table:
    """An empty table that says what was run, and where."""
    return Table(
        title=(
            f"shuffle, {record.traffic} traffic: {where}, {record.tokens} tokens a rank, hidden {record.hidden}, "
            f"top-{record.num_topk} of {record.num_experts}, {record.dtype}"
        ),
        title_justify="left",
        caption="\n".join(notes),
        caption_justify="left",
    )


def _baseline_ms(records: Sequence[DeviceRecord] | Sequence[InternodeRecord]) -> float | None:
    return next((record.total_ms for record in records if record.variant == "baseline"), None)


def _internode_notes(records: Sequence[InternodeRecord]) -> list[str]:
    ours, peaks = records[0], records[0].peaks
    share = ours.metadata_bytes / ours.internode_row_bytes if ours.internode_row_bytes else 0.0
    notes = [
        *_variant_notes(records),
        f"network between nodes, NCCL, GB/s a rank and direction, both at once: {peaks['paired_gbs']:.2f} with one "
        f"rank, {peaks['spread_gbs']:.2f} with all of other nodes",
        f"MB: rows of one dispatch; busiest: the most that a rank sends or receives; {ours.variant} also sends "
        f"{ours.metadata_bytes / 1e6:.2f} MB of metadata ({share:.1%})",
    ]
    if ours.emulation:
        notes.append(f"nodes are played on one machine, by NCCL's network; {ours.emulation}")
    return [*notes, *_origin(ours)]


def _origin(record: VariantRecord) -> list[str]:
    """Where the routing comes from, and what the figures were made with."""
    repeats = f"; repeated {record.trace_repeats:.2f} times" if record.trace_repeats > 1 else ""
    return [
        *([f"trace: {record.trace}{repeats}"] if record.trace else []),
        describe_origin(record, record.nodes * record.ranks_per_node),
    ]


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _notes(records: Sequence[DeviceRecord]) -> list[str]:
    record, peaks = records[0], records[0].peaks
    floor_ms = record.remote_row_bytes / 1e6 / peaks["copy_engine_pull_gbs"] if peaks["copy_engine_pull_gbs"] else 0.0
    notes = [
        *_variant_notes(records),
        f"each rank must take in up to {record.remote_row_bytes / 1e6:.1f} MB of rows: {floor_ms:.3f} ms at the peak",
        f"peaks in GB/s: copy engine {peaks['copy_engine_pull_gbs']:.0f} pulling, {peaks['copy_engine_push_gbs']:.0f} "
        f"pushing; multiprocessors {peaks['sm_pull_gbs']:.0f} and {peaks['sm_push_gbs']:.0f}; local "
        f"{peaks['local_gbs']:.0f} read and written",
    ]
    if record.num_sms:
        taken = ", ".join(f"{name} {num_sms}" for name, num_sms in record.num_sms.items())
        notes.append(f"multiprocessors taken by {record.variant}: {taken}")
    if record.kernel_us:
        kernels = ", ".join(f"{name} {us:.0f}" for name, us in record.kernel_us.items())
        notes.append(f"kernels of {record.variant} in us, side by side and waiting included: {kernels}")
    return [*notes, *_origin(record)]


def _variant_notes(records: Sequence[VariantRecord]) -> list[str]:
    """How times were taken, and of what."""
    from fusco.bench.variants import WHAT

    return [
        f"medians of {records[0].num_iterations}, the slowest rank's, on the device, once all ranks' devices have met; "
        f"planning and barriers counted",
        *(f"{record.variant}: {WHAT[record.variant]}" for record in records),
    ]
