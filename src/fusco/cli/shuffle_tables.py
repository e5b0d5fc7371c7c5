"""Tables of ``fusco bench shuffle``.

On the CPU a column for each variant; on GPUs, within a node and between nodes, a row.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from fusco.bench.shuffle.device_results import DeviceRecord, InternodeRecord
from fusco.bench.shuffle.results import ShuffleRecord, VariantRecord, gains_of
from fusco.bench.shuffle.variants import VARIANTS
from fusco.cli.tables import describe_origin, new_table, verified_cell

# Name of a figure, and its row on the CPU.
_FIGURES = {
    "dispatch_ms": "dispatch",
    "combine_ms": "combine",
    "total_ms": "dispatch + combine",
    "bound_ms": "  bound of each, by the busiest rank",
    "planning_ms": "  planning",
    "staging_ms": "  staging (copy into shared memory)",
    "wire_ms": "  wire (and what is fused into it)",
    "rearranging_ms": "  only rearranging",
    "internode_row_bytes": "rows between nodes",
    "internode_row_bytes_lower_bound": "  lower bound",
    "busiest_rank_bytes": "  busiest rank",
    "intranode_row_bytes": "rows within nodes",
    "lane_row_bytes": "  read to send them for others",
    "metadata_bytes": "metadata between nodes",
}


def print_cpu_records(records: Sequence[ShuffleRecord], console: Console) -> None:
    """Print a column for each variant of a workload, and notes on the run; of batches of a prefill the gains."""
    console.print(_gains(records) if records[-1].batch else _cpu_table(records))


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


def _cpu_table(records: Sequence[ShuffleRecord]) -> Table:
    first, by_name = records[0], {record.variant: record for record in records}
    has_ratio = {"fusco", "baseline"} <= set(by_name)
    title = _title(first, f"{first.nodes} nodes x {first.ranks_per_node} ranks") + f", on {first.device}"
    table = new_table(title, ("", *by_name, *(["baseline / fusco"] if has_ratio else [])), _cpu_notes(first))
    for name, label in _FIGURES.items():
        if name == "bound_ms" and not first.bound_ms:
            continue
        unit, scale = ("ms", 1.0) if name.endswith("_ms") else ("MB", 1e-6)
        cells = [f"{getattr(record, name) * scale:,.2f} {unit}" for record in records]
        if has_ratio:
            fusco, baseline = (getattr(by_name[variant], name) for variant in ("fusco", "baseline"))
            cells.append(f"{baseline / fusco:.2f}" if fusco else "-")
        table.add_row(label, *cells, end_section=name == "rearranging_ms")
    table.add_row("verified", *(verified_cell(record.is_right) for record in records))
    return table


def _title(one: VariantRecord, where: str) -> str:
    return (
        f"shuffle, {one.traffic} traffic: {where}, {one.tokens} tokens a rank, hidden {one.hidden}, "
        f"top-{one.num_topk} of {one.num_experts}, {one.dtype}"
    )


def _cpu_notes(record: ShuffleRecord) -> list[str]:
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
    return [*notes, *_origin(record)]


def print_device_records(records: Sequence[DeviceRecord], console: Console) -> None:
    """Print a row for each variant within a node, and notes on the run."""
    columns = ("dispatch\nGB/s", "of\npeak", "combine\nGB/s", "of\npeak")
    cells = [
        (
            _number(record.dispatch_gbs, ".0f"),
            _number(record.dispatch_of_peak, ".0%"),
            _number(record.combine_gbs, ".0f"),
            _number(record.combine_of_peak, ".0%"),
        )
        for record in records
    ]
    console.print(_table(records, f"{records[0].ranks_per_node} GPUs", columns, cells, _device_notes(records)))


def print_internode_records(records: Sequence[InternodeRecord], console: Console) -> None:
    """Print a row for each variant between nodes: times and bytes, compared with the network's peak in the same run."""
    columns = ("sent\nMB", "least\nMB", "busiest\nMB", "at peak\nms", "dispatch\n/ that", "combine\n/ that")
    cells = [
        (
            f"{record.internode_row_bytes / 1e6:,.1f}",
            f"{record.internode_row_bytes_lower_bound / 1e6:,.1f}",
            f"{record.busiest_rank_bytes / 1e6:,.1f}",
            f"{record.bound_ms:.3f}",
            _number(record.dispatch_over_bound, ".2f"),
            _number(record.combine_over_bound, ".2f"),
        )
        for record in records
    ]
    where = f"{records[0].nodes} nodes x {records[0].ranks_per_node} GPUs"
    console.print(_table(records, where, columns, cells, _internode_notes(records)))


def _table(
    records: Sequence[DeviceRecord | InternodeRecord],
    where: str,
    columns: Sequence[str],
    cells: Sequence[Sequence[str]],
    notes: Sequence[str],
) -> Table:
    """Return a table of the times of all variants, and of ``cells`` by the columns given."""
    times = ("ms", "dispatch", "combine", "both", "20 in\na row", "baseline\n/ it", "idle\nto idle")
    table = new_table(_title(records[0], where), (*times, *columns, "verified"), notes, left=times[:1])
    table.columns[0].min_width = 14
    # One rank alone sends nothing, so that its baseline, which sorts and copies, says nothing of communication.
    is_alone = records[0].nodes * records[0].ranks_per_node == 1
    baseline_ms = next((each.loop_ms for each in records if each.variant == "baseline" and not is_alone), None)
    for record, more in zip(records, cells, strict=True):
        times_ms = (record.dispatch_ms, record.combine_ms, record.total_ms, record.loop_ms)
        table.add_row(
            record.variant,
            *(_number(time_ms, ".3f") for time_ms in times_ms),
            f"{baseline_ms / record.loop_ms:.2f}" if baseline_ms and record.loop_ms else "-",
            _number(record.idle_ms, ".3f"),
            *more,
            verified_cell(record.is_right),
        )
    return table


def _internode_notes(records: Sequence[InternodeRecord]) -> list[str]:
    first, peaks = records[0], records[0].peaks
    share = first.metadata_bytes / first.internode_row_bytes if first.internode_row_bytes else 0.0
    notes = [
        *_variant_notes(records),
        f"network between nodes, NCCL, GB/s per rank and direction, both at once: {peaks['paired_gbs']:.2f} with one "
        f"rank, {peaks['spread_gbs']:.2f} with all of other nodes",
        "MB: rows of one dispatch, of all ranks, and the least possible; busiest: the maximum that a rank sends or "
        f"receives; {first.variant} also sends {first.metadata_bytes / 1e6:.2f} MB of metadata ({share:.1%})",
    ]
    if first.emulation:
        notes.append(f"nodes are emulated on one machine, by NCCL's network; {first.emulation}")
    return [*notes, *_origin(first)]


def _origin(record: VariantRecord) -> list[str]:
    """Return notes on the source of the routing and the environment."""
    num_tokens = record.tokens * record.nodes * record.ranks_per_node
    repeats = f"; repeated {record.trace_repeats:.2f} times for {num_tokens} tokens" if record.trace_repeats > 1 else ""
    return [
        *([f"trace: {record.trace}{repeats}"] if record.trace else []),
        describe_origin(record, record.nodes * record.ranks_per_node),
    ]


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _device_notes(records: Sequence[DeviceRecord]) -> list[str]:
    record, peaks = records[0], records[0].peaks
    floor_ms = record.remote_row_bytes / 1e6 / peaks["copy_engine_pull_gbs"] if peaks["copy_engine_pull_gbs"] else 0.0
    notes = [
        *_variant_notes(records),
        f"each rank must receive up to {record.remote_row_bytes / 1e6:.1f} MB of rows: {floor_ms:.3f} ms at the peak",
        f"peaks in GB/s: copy engine {peaks['copy_engine_pull_gbs']:.0f} pulling, {peaks['copy_engine_push_gbs']:.0f} "
        f"pushing; multiprocessors {peaks['sm_pull_gbs']:.0f} and {peaks['sm_push_gbs']:.0f}; local "
        f"{peaks['local_gbs']:.0f} read and written",
    ]
    if record.num_sms:
        taken = ", ".join(f"{name} {num_sms}" for name, num_sms in record.num_sms.items())
        notes.append(f"multiprocessors taken by {record.variant}: {taken}")
    if record.kernel_us:
        kernels = ", ".join(f"{name} {us:.0f}" for name, us in record.kernel_us.items())
        notes.append(f"kernels of {record.variant} in us, concurrent and waiting included: {kernels}")
    return [*notes, *_origin(record)]


def _variant_notes(records: Sequence[VariantRecord]) -> list[str]:
    """Return notes on the measurement and the variants."""
    return [
        f"medians of {records[0].num_iterations}, the slowest rank's, after an all-reduce; planning and barriers "
        f"included; on the device, enqueued half a millisecond ahead",
        "20 in a row, idle to idle: the host's time for both, each of 20 calls in a row, and one between idle devices",
        *(f"{record.variant}: {VARIANTS[record.variant]}" for record in records),
    ]
