"""``fusco bench rails``: several NICs as one link, on a testbed; the analogues of FuseLink's figures and tables."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from fusco.bench.harness.json_lines import write_json_lines
from fusco.bench.names import MAX_CASE_S
from fusco.cli import options
from fusco.cli.running import collect, new_console
from fusco.cli.tables import describe_origin, new_table

if TYPE_CHECKING:
    from fusco.bench.rails.record import RailsRecord


def rails(
    only: Annotated[
        list[str] | None,
        typer.Option(
            help="Benchmarks: bandwidth, contention, steps, incast, serving, all-to-all, embeddings, costs, change, "
            "flapping, killing. Default: all, some minutes."
        ),
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(help="Policies, or nccl: the plugin. Default: direct, spray, fuselink-paper, fuselink."),
    ] = None,
    num_rails: Annotated[int, typer.Option("--rails", min=2, max=16, help="Rails of each host.")] = 4,
    rate: Annotated[str, typer.Option(help="Rate of a rail, such as 2gbit.")] = "2gbit",
    seconds: Annotated[
        float | None, typer.Option(min=0.5, max=MAX_CASE_S, help="Seconds of a case. Default: each benchmark's.")
    ] = None,
    json: options.JsonFile = None,
) -> None:
    """Measure rails on a testbed: bandwidth, isolation, serving, skewed exchanges, control costs, failures.

    Each benchmark is the analogue of a figure or table of FuseLink (OSDI 2025) and says of which. Hosts are network
    namespaces of this machine, which the processors of this machine must be able to feed: 4 rails of 2gbit need one.
    """
    from fusco.bench.rails.crew import VARIANTS
    from fusco.bench.rails.suite import BENCHMARKS, run_suite
    from fusco.rails import POLICIES

    names = options.choose_names(only, list(BENCHMARKS), "only")
    policies = options.choose_names(policy or list(reversed(POLICIES)), list(VARIANTS), "policy")
    console = new_console(json)
    without = f"there is no case of {', '.join(names)} with {num_rails} rails for policy {', '.join(policies)}"
    records = collect(run_suite(names, policies, (num_rails, rate), seconds), console, without)
    for _, group in groupby(records, key=lambda record: (record.benchmark, tuple(record.results))):
        console.print(_table(list(group)))
    console.print(describe_origin(records[0], 1, ("pyroute2",)))
    write_json_lines(records, json)


def _table(records: Sequence[RailsRecord]) -> Table:
    one = records[0]
    analogue = "" if one.analogue == "none" else f" (FuseLink, {one.analogue})"
    shape = f"{one.num_hosts} hosts, {one.num_rails} rails of {one.bits_per_s / 1e9:g} Gbit/s"
    names = ("case", "policy")
    table = new_table(f"{one.benchmark}{analogue}: {shape}", (*names, *one.results), left=names)
    for i, record in enumerate(records):
        is_last = i + 1 == len(records) or (records[i + 1].case != record.case and len({r.policy for r in records}) > 1)
        values = (f"{each:,.0f}" if float(each).is_integer() else f"{each:,.3g}" for each in record.results.values())
        table.add_row(escape(record.case), escape(record.policy), *values, end_section=is_last)
    return table
