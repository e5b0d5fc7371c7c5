"""``fusco bench``: verify, then measure: shuffle, all-to-all, prefill, decode, balancers, schedules, rails, host."""

from __future__ import annotations

import typer

from fusco.cli.bench_alltoall import alltoall
from fusco.cli.bench_decode import decode
from fusco.cli.bench_host import host
from fusco.cli.bench_links import offload, rails
from fusco.cli.bench_planning import balance, balancers, schedule
from fusco.cli.bench_prefill import prefill
from fusco.cli.bench_shuffle import shuffle
from fusco.cli.help import CommandGroup, add_commands

app = typer.Typer(cls=CommandGroup, help="Verify, then measure.", no_args_is_help=True)
add_commands(
    app, (shuffle, alltoall, schedule, host, prefill, decode, rails, offload, balancers, balance), prefix="bench "
)
