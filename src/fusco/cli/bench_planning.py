"""``fusco bench schedule`` and ``fusco bench balancers``: how good plans are, and the time it takes to find them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import track

from fusco.bench import names
from fusco.cli import options
from fusco.cli.reports import report, table_of
from fusco.cli.running import new_console
from fusco.cli.tables import ResultTable, describe_origin

if TYPE_CHECKING:
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
    report(records, [_schedule_table(records)], console, json)


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
) -> None:
    """Compare balancers on the loads of many draws: how far the busiest rank is from the bound, and the time."""
    from fusco.bench.balancers import compare_balancers

    records = compare_balancers([(4, 2), (8, 2), (2, 8), (4, 8), (8, 8), (16, 8)], draws, seed, loads)
    report(records, [_balancer_table(records, draws)], new_console(json), json)


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
