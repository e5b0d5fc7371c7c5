"""``fusco bench schedule``, ``balancers`` and ``balance``: how good plans are, and the time it takes to find them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from statistics import median
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import track

from fusco.bench import names
from fusco.cli import options
from fusco.cli.reports import Column, report, table_of
from fusco.cli.running import new_console
from fusco.cli.tables import ResultTable, conclusion, describe_origin

if TYPE_CHECKING:
    from fusco.bench.balance import BalanceRecord
    from fusco.bench.balancers import BalancerRecord
    from fusco.bench.schedule import ScheduleRecord

_NOTES = (
    "over bound: length of all stages over the largest row or column sum, exactly 1 in mode exact",
    "* not measured here: constants of another machine (AMD EPYC, see docs/performance/schedule.md), of FAST's "
    "published C++, its decomposition alone",
)


def schedule(
    draws: options.Draws = 50,
    nodes: Annotated[
        list[int] | None, typer.Option(min=2, max=1024, help="Numbers of nodes. Default: 2 to 128.")
    ] = None,
    seed: options.Seed = 0,
    json: options.JsonFile = None,
) -> None:
    """Compare schedules between nodes on random matrices: stages, length, and the time it takes to find them.

    One call from Python each, on one core; every schedule is verified. Exit code 1 if one is wrong.
    """
    from fusco.bench.schedule import MODES, NUM_NODES, measure_schedules

    console, sizes = new_console(json), nodes or NUM_NODES
    total, measuring = len(sizes) * len(MODES), measure_schedules(sizes, draws, seed)
    # Refreshed between measurements only: a thread that refreshes would disturb them.
    records = list(track(measuring, "measuring", total, auto_refresh=False, console=console, transient=True))
    slowest = {record.mode: f"{record.mode} {record.microseconds:,.0f} us" for record in records[-len(MODES) :]}
    found = conclusion(f"stages of {records[-1].num_nodes} nodes are found in: {', '.join(slowest.values())}")
    report(records, [_schedule_table(records), found], console, json)


def _schedule_table(records: Sequence[ScheduleRecord]) -> ResultTable:
    rows = [{of.mode: of for of in group} for _, group in groupby(records, key=lambda record: record.num_nodes)]

    def of_fast(by_mode: Mapping[str, ScheduleRecord], shown: str) -> str:
        exact = by_mode["exact"]
        return shown.format(exact.fast_us, exact.fast_us / exact.microseconds) if exact.fast_us else ""

    columns = (
        ("nodes", "{0[exact].num_nodes}"),
        ("exact\nstages", "{0[exact].num_stages:g}"),
        ("\nus", "{0[exact].microseconds:,.1f}"),
        ("FAST*\nus", lambda by_mode: of_fast(by_mode, "{0:,.1f}")),
        ("* / exact\n", lambda by_mode: of_fast(by_mode, "{1:.1f}")),
        ("few\nstages", "{0[few].num_stages:g} ({0[few].most_stages})"),
        ("over\nbound", "{0[few].largest_ratio:.4f}"),
        ("\nus", "{0[few].microseconds:,.1f}"),
        ("spread-out\nover bound", "{0[spread-out].mean_ratio:.2f}"),
        ("\nus", "{0[spread-out].microseconds:,.1f}"),
    )
    title = f"entries uniform in 1..100,000, {records[0].num_draws} matrices: medians, in brackets the worst"
    return table_of(rows, title, columns, (*_NOTES, describe_origin(records[0], 1, ("numba",))))


def balancers(
    draws: options.Draws = 1000,
    loads: Annotated[
        names.Loads, typer.Option(help="bimodal: Beta(0.2, 0.2); one-prompt, ragged: prefills of the Azure trace.")
    ] = "bimodal",
    seed: options.Seed = 0,
    json: options.JsonFile = None,
    html: options.HtmlFile = None,
) -> None:
    """Compare balancers on the loads of many draws: how far the busiest rank is from the bound, and the time."""
    from fusco.bench.balancers import compare_balancers
    from fusco.planner.balancer import BALANCERS

    records = compare_balancers([(4, 2), (8, 2), (2, 8), (4, 8), (8, 8), (16, 8)], draws, seed, loads)
    most = {name: max(of.busiest_ratio for of in records if of.balancer == name) for name in BALANCERS}
    found = conclusion(
        f"busiest rank over the bound, at most: {', '.join(f'{name} {most[name]:.3f}' for name in most)}"
    )
    report(records, [_balancer_table(records, draws), found], new_console(json), json, html=html)


def _balancer_table(records: Sequence[BalancerRecord], num_draws: int) -> ResultTable:
    columns = (
        ("nodes x ranks", "{0.nodes} x {0.ranks_per_node}"),
        ("balancer", "{0.balancer}"),
        ("busiest sender", "{0.send_ratio:.3f}"),
        ("busiest receiver", "{0.receive_ratio:.3f}"),
        ("busiest", "{0.busiest_ratio:.3f}"),
        ("rows moved", "{0.moved_share:.0%}"),
        ("time", "{0.microseconds:.0f} us"),
        ("gain", "{0.gain:.2f}"),
        ("P99", "{0.gain_p99:.2f}"),
    )
    loads, left = records[0].loads, ("nodes x ranks", "balancer")
    title = (
        f"rows of the busiest rank over the bound, {loads}, medians of {num_draws} draws; gain over send-and-receive"
    )
    return table_of(records, title, columns, left=left, section=lambda record: record.nodes)


def balance(
    trace: options.TraceFile = None,
    trace_key: options.TraceKey = None,
    ranks: Annotated[str, typer.Option(help="Numbers of ranks, with commas between them.")] = "8,16,32,64",
    spare_places: options.SparePlaces = 2,
    layer: Annotated[int | None, typer.Option(min=0, help="Layer of the trace. Default: all.")] = None,
    num_experts: Annotated[
        int | None, typer.Option(min=1, max=1 << 14, help="Experts. Default: 128, or as many as the trace names.")
    ] = None,
    expert_bytes: Annotated[int, typer.Option(min=1, help="Bytes of an expert's weights.")] = 9_437_184,
    link_gbs: Annotated[float, typer.Option(min=1e-3, help="GB/s at which a rank receives copies.")] = 50.0,
    row_us: Annotated[float, typer.Option(min=1e-6, help="Time of a row in an expert, in us.")] = 0.0189,
    hidden_copies: Annotated[
        bool, typer.Option("--hidden-copies/--costly-copies", help="Copies cost nothing, or their time on the link.")
    ] = True,
    json: options.JsonFile = None,
    html: options.HtmlFile = None,
) -> None:
    """Show how unequal ranks' work is in real routing, and what copies of busy experts, planned for the batch, leave.

    Experts are on consecutive ranks, and the batch is the whole trace. Defaults of bytes and times are those of
    Qwen3-30B-A3B, computed for 50 GB/s and 500 TFLOP/s.
    """
    sizes = options.integers([ranks], "ranks")
    from fusco.bench.balance import Costs, measure_balance  # it takes seconds, and numbers are right now
    from fusco.bench.inputs.traffic import Trace
    from fusco.core.balance import Balance

    traces = Trace.load_all(trace, trace_key) if layer is None else [Trace.load(trace, trace_key, layer)]
    named = max(int(each.topk_idx.max(initial=0)) for each in traces) + 1
    experts = num_experts or (128 if trace is None else named)
    for each in traces:
        each.check(experts, each.topk_idx.shape[1])
    costs = Costs(expert_bytes, link_gbs, row_us)
    wanted = Balance(spare_places, rows_per_copy=0.0 if hidden_copies else costs.copy_us / row_us)
    console, first = new_console(json), 0 if layer is None else layer
    measuring = measure_balance(traces, sizes, experts, wanted, costs, first)
    total = len(traces) * len(sizes)
    records = list(track(measuring, "planning", total, auto_refresh=False, console=console, transient=True))
    last = [record for record in records if record.ranks == records[-1].ranks]
    before, after = (
        median(getattr(each, f"busiest_over_mean_{when}") for each in last) for when in ("before", "after")
    )
    found = f"{last[0].ranks} ranks: the busiest has {before:.2f} times the mean rows, with copies {after:.2f}"
    report(records, [_balance_table(records), conclusion(f"{found}, medians of layers")], console, json, html=html)


def _balance_table(records: Sequence[BalanceRecord]) -> ResultTable:
    one = records[0]
    by_ranks = [list(group) for _, group in groupby(records, key=lambda record: record.ranks)]

    def over_layers(name: str, form: str) -> Callable[[list[BalanceRecord]], str]:
        def cell(of: list[BalanceRecord]) -> str:
            values = sorted(getattr(record, name) for record in of)
            return f"{values[len(values) // 2]:{form}} {values[-1]:{form}}"

        return cell

    columns: tuple[Column, ...] = (
        ("ranks", lambda of: f"{of[0].ranks}"),
        ("before", over_layers("busiest_over_mean_before", ".2f")),
        ("after", over_layers("busiest_over_mean_after", ".3f")),
        ("experts copied\na rank", over_layers("experts_copied_per_rank", ".2f")),
        ("copies\nms", over_layers("copy_ms", ".2f")),
        ("MB moved", lambda of: f"{max(record.bytes_moved for record in of) / 1e6:,.0f}"),
        ("plan\nus", over_layers("plan_us", ".0f")),
        ("break-even\ntokens", _break_even),
    )
    title = (
        f"rows of the busiest rank over the mean, {one.trace.partition(',')[0]}: {one.num_tokens} tokens, "
        f"{one.spare_places} spare places a rank"
    )
    notes = (
        "median and most of all layers; break-even: tokens of all ranks from which on copies that nothing hides pay, "
        "median",
        describe_origin(one, 1, ("numba",)),
    )
    return table_of(by_ranks, title, columns, notes)


def _break_even(of: list[BalanceRecord]) -> str:
    known = sorted(record.break_even_tokens for record in of if record.break_even_tokens is not None)
    return f"{known[len(known) // 2]:,}" if known else "-"
