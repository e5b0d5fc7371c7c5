"""Tables of ``fusco bench shuffle``.

On the CPU a column for each variant; on GPUs, within a node and between nodes, a row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fusco.bench.shuffle.records import DeviceRecord, InternodeRecord, ShuffleRecord, VariantRecord, gains_of
from fusco.bench.shuffle.variants import VARIANTS, is_of_caller
from fusco.cli.reports import Column, table_of
from fusco.cli.tables import ResultTable, describe_origin, shape_of, verified_cell
from fusco.cli.wording import plural

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

_OF_ALL = ("dispatch_ms", "combine_ms", "total_ms", "bound_ms", "internode_row_bytes_lower_bound")


def table_of_records(records: Sequence[Any]) -> ResultTable:
    """Return a table of a workload's records: variants are columns on the CPU, rows on GPUs; of batches the gains."""
    if isinstance(records[0], DeviceRecord):
        return _within_node(records)
    if isinstance(records[0], InternodeRecord):
        return _between_nodes(records)
    return _gains(records) if records[-1].batch else _cpu_table(records)


def _gains(records: Sequence[ShuffleRecord]) -> ResultTable:
    first, num_batches = records[0], records[-1].batch + 1
    title = (
        f"{first.traffic} prefills, {num_batches} batches: {shape_of(first.nodes, first.ranks_per_node)}, at most "
        f"{first.tokens} tokens a rank, hidden {first.hidden}; gain of {first.variant}: a variant's time over its time"
    )
    columns: tuple[Column, ...] = (
        ("", "{.variant}"),
        ("median", "{.median:.3f}"),
        ("P99", "{.p99:.3f}"),
        ("rows of the busiest rank: median", "{.rows_median:.3f}"),
        ("P99", "{.rows_p99:.3f}"),
    )
    table = table_of(gains_of(records), title, columns, [describe_origin(first, first.nodes * first.ranks_per_node)])
    table.add_row("verified", verified_cell(all(record.is_right for record in records)), "", "", "")
    return table


def _cpu_table(records: Sequence[ShuffleRecord]) -> ResultTable:
    first, by_name = records[0], {record.variant: record for record in records}
    has_ratio = {"fusco", "baseline"} <= set(by_name)
    title = _title(first, shape_of(first.nodes, first.ranks_per_node)) + f", on {first.device}"
    table = ResultTable(title, ("", *by_name, *(["baseline / fusco"] if has_ratio else [])), _cpu_notes(first))
    for name, label in _FIGURES.items():
        if name == "bound_ms" and not first.bound_ms:
            continue
        unit, scale = ("ms", 1.0) if name.endswith("_ms") else ("MB", 1e-6)
        cells = [
            f"{getattr(record, name) * scale:,.2f} {unit}" if _is_known(record, name) else "-" for record in records
        ]
        if has_ratio:
            fusco, baseline = (getattr(by_name[variant], name) for variant in ("fusco", "baseline"))
            cells.append(f"{baseline / fusco:.2f}" if fusco else "-")
        table.add_row(label, *cells, end_section=name == "rearranging_ms")
    table.add_row("verified", *(verified_cell(record.is_right) for record in records))
    return table


def _is_known(record: ShuffleRecord, figure: str) -> bool:
    """Return whether a figure is measured: of a variant of the caller, which is not looked into, few are."""
    return figure in _OF_ALL or not is_of_caller(record.variant)


def _title(one: VariantRecord, where: str) -> str:
    return (
        f"shuffle, {one.traffic} traffic: {where}, {one.tokens} tokens a rank, hidden {one.hidden}, "
        f"top-{one.num_topk} of {one.num_experts}, {one.dtype}"
    )


def _cpu_notes(record: ShuffleRecord) -> list[str]:
    num_ranks = record.nodes * record.ranks_per_node
    notes = [
        f"medians of {plural(record.num_iterations, 'iteration')}, the slowest rank's time; bytes of one "
        "dispatch, all ranks",
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


def _within_node(records: Sequence[DeviceRecord]) -> ResultTable:
    columns = (
        ("dispatch\nGB/s", _number("dispatch_gbs", ".0f")),
        ("of\npeak", _number("dispatch_of_peak", ".0%")),
        ("combine\nGB/s", _number("combine_gbs", ".0f")),
        ("of\npeak", _number("combine_of_peak", ".0%")),
    )
    return _table(records, f"{records[0].ranks_per_node} ranks", columns, _device_notes(records))


def _between_nodes(records: Sequence[InternodeRecord]) -> ResultTable:
    """Return times and bytes, compared with the network's peak in the same run."""
    columns = (
        ("sent\nMB", lambda of: f"{of.internode_row_bytes / 1e6:,.1f}"),
        ("least\nMB", lambda of: f"{of.internode_row_bytes_lower_bound / 1e6:,.1f}"),
        ("busiest\nMB", lambda of: f"{of.busiest_rank_bytes / 1e6:,.1f}"),
        ("at peak\nms", "{.bound_ms:.3f}"),
        ("dispatch\n/ that", _number("dispatch_over_bound", ".2f")),
        ("combine\n/ that", _number("combine_over_bound", ".2f")),
    )
    where = shape_of(records[0].nodes, records[0].ranks_per_node)
    return _table(records, where, columns, _internode_notes(records))


def _table(
    records: Sequence[DeviceRecord | InternodeRecord], where: str, columns: Sequence[Column], notes: Sequence[str]
) -> ResultTable:
    """Return a table of the times of all variants, and of the columns given."""
    # One rank alone sends nothing, so that its baseline, which sorts and copies, says nothing of communication.
    is_alone = records[0].nodes * records[0].ranks_per_node == 1
    baseline_ms = next((each.loop_ms for each in records if each.variant == "baseline" and not is_alone), None)
    times: tuple[Column, ...] = (
        ("ms", "{.variant}"),
        ("dispatch", _number("dispatch_ms", ".3f")),
        ("combine", _number("combine_ms", ".3f")),
        ("both", _number("total_ms", ".3f")),
        ("20 in\na row", _number("loop_ms", ".3f")),
        ("baseline\n/ it", lambda of: f"{baseline_ms / of.loop_ms:.2f}" if baseline_ms and of.loop_ms else "-"),
        ("idle\nto idle", _number("idle_ms", ".3f")),
    )
    verified: Column = ("verified", lambda of: verified_cell(of.is_right))
    return table_of(records, _title(records[0], where), (*times, *columns, verified), notes, left=("ms",))


def _number(name: str, form: str) -> Callable[[Any], str]:
    """Return what makes a cell of a field, which may be ``None``."""
    return lambda record: "-" if getattr(record, name) is None else format(getattr(record, name), form)


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


def _device_notes(records: Sequence[DeviceRecord]) -> list[str]:
    record, peaks = records[0], records[0].peaks
    floor_ms = record.remote_row_bytes / 1e6 / peaks["copy_engine_pull_gbs"] if peaks["copy_engine_pull_gbs"] else 0.0
    notes = [
        *_variant_notes(records),
        f"each rank must receive up to {record.remote_row_bytes / 1e6:.1f} MB of rows: {floor_ms:.3f} ms at the peak",
        f"peaks in GB/s: copy engine {peaks['copy_engine_pull_gbs']:.0f} pulling, {peaks['copy_engine_push_gbs']:.0f} "
        f"pushing; SMs {peaks['sm_pull_gbs']:.0f} and {peaks['sm_push_gbs']:.0f}; local "
        f"{peaks['local_gbs']:.0f} read and written",
    ]
    if record.num_sms:
        taken = ", ".join(f"{name} {num_sms}" for name, num_sms in record.num_sms.items())
        notes.append(f"SMs taken by {record.variant}: {taken}")
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
        *(f"{record.variant}: {VARIANTS.get(record.variant, 'yours')}" for record in records),
    ]
