"""``fusco bench schedule``: number and length of stages, and the time it takes to find them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import track
from rich.table import Table

from fusco.bench.harness.json_lines import write_json_lines
from fusco.cli import options
from fusco.cli.running import new_console
from fusco.cli.tables import describe_origin, new_table

if TYPE_CHECKING:
    from fusco.bench.schedule import ScheduleRecord


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
    console.print(_table(records))
    write_json_lines(records, json)


def _table(records: Sequence[ScheduleRecord]) -> Table:
    one = records[0]
    title = f"entries uniform in 1..100,000, {one.num_draws} matrices: medians, in brackets the worst"
    columns = (
        *("nodes", "exact\nstages", "\nus", "FAST*\nus", "* / exact\n"),
        *("few\nstages", "over\nbound", "\nus", "spread-out\nover bound", "\nus"),
    )
    notes = (
        "over bound: length of all stages over the largest row or column sum, exactly 1 in mode exact",
        "* not measured here: constants of another machine (AMD EPYC, see docs/performance/schedule.md), of FAST's "
        "published C++, its decomposition alone",
        describe_origin(one, 1, ("numba",)),
    )
    table = new_table(title, columns, notes)
    for num_nodes, group in groupby(records, key=lambda record: record.num_nodes):
        by_mode = {record.mode: record for record in group}
        exact, few, shifted = by_mode["exact"], by_mode["few"], by_mode["spread-out"]
        fast_us = exact.fast_us
        table.add_row(
            str(num_nodes),
            f"{exact.num_stages:g}",
            f"{exact.microseconds:,.1f}",
            f"{fast_us:,.1f}" if fast_us else "",
            f"{fast_us / exact.microseconds:.1f}" if fast_us else "",
            f"{few.num_stages:g} ({few.most_stages})",
            f"{few.largest_ratio:.4f}",
            f"{few.microseconds:,.1f}",
            f"{shifted.mean_ratio:.2f}",
            f"{shifted.microseconds:,.1f}",
        )
    return table
