"""``fusco bench``: verify, then measure: shuffle, all-to-all, prefill, balancers, schedules, rails, host."""

from __future__ import annotations

from typing import Annotated

import typer

from fusco.bench import names
from fusco.bench.harness.json_lines import write_json_lines
from fusco.cli import options
from fusco.cli.bench_alltoall import alltoall
from fusco.cli.bench_host import host
from fusco.cli.bench_offload import offload
from fusco.cli.bench_prefill import prefill
from fusco.cli.bench_rails import rails
from fusco.cli.bench_schedule import schedule
from fusco.cli.bench_shuffle import shuffle
from fusco.cli.running import new_console
from fusco.cli.tables import new_table

app = typer.Typer(help="Verify, then measure.", no_args_is_help=True)
for _command in (shuffle, alltoall, schedule, host, prefill, rails, offload):
    app.command()(_command)


@app.command()
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
    ratios = ("busiest sender", "busiest receiver", "busiest")
    columns = ("nodes x ranks", "balancer", *ratios, "rows moved", "time", "gain", "P99")
    title = f"rows of the busiest rank over the bound, {loads}, medians of {draws} draws; gain over send-and-receive"
    table = new_table(title, columns, left=("balancer",))
    for i, record in enumerate(records):
        is_last = i + 1 == len(records) or records[i + 1].nodes != record.nodes
        table.add_row(
            f"{record.nodes} x {record.ranks_per_node}",
            record.balancer,
            *(f"{ratio:.3f}" for ratio in (record.send_ratio, record.receive_ratio, record.busiest_ratio)),
            f"{record.moved_share:.0%}",
            f"{record.microseconds:.0f} us",
            *(f"{gain:.2f}" for gain in (record.gain, record.gain_p99)),
            end_section=is_last,
        )
    new_console(json).print(table)
    write_json_lines(records, json)
