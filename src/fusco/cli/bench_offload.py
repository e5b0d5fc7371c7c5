"""``fusco bench offload``: copies between GPUs and pinned host memory over one PCIe link and over several."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from fusco.bench.harness.json_lines import write_json_lines
from fusco.cli import options
from fusco.cli.running import collect, new_console
from fusco.cli.tables import describe_origin, new_table

if TYPE_CHECKING:
    from fusco.bench.offload.copies import OffloadRecord

_MB = 1 << 20


def offload(
    only: Annotated[
        list[str] | None,
        typer.Option(help="Benchmarks: sizes, variants, both-busy, owner, memory. Default: all, about a minute."),
    ] = None,
    json: options.JsonFile = None,
) -> None:
    """Copy between a GPU and pinned host memory, verified, compared with cudaMemcpyAsync; GPU 1 is the idle one.

    Variants are those of FuseLink's Figure 6. Over the other GPU's link, its buffer is filled by threads (D1) or by a
    copy engine (D2); over the GPU's own link, threads (D3) or a copy engine (D4) write to host memory.
    """
    import torch

    from fusco.bench.offload.copies import BENCHMARKS, run

    names = options.choose_names(only, list(BENCHMARKS), "only")
    if not torch.cuda.is_available():
        raise ValueError("this machine has no GPU that PyTorch can use")
    console = new_console(json)
    records = collect(run(names), console, f"{', '.join(names)}: this needs two GPUs, and there is one")
    for _, group in groupby(records, key=lambda record: (record.benchmark, tuple(record.results))):
        console.print(_table(list(group)))
    console.print(describe_origin(records[0], 1))
    write_json_lines(records, json)


def _table(records: list[OffloadRecord]) -> Table:
    columns = ("case", "variant", "MiB", "launch MiB", *records[0].results)
    table = new_table(records[0].benchmark, columns, left=("case", "variant"))
    for record in records:
        sizes = (f"{each / _MB:g}" if each else "" for each in (record.num_bytes, record.chunk_bytes))
        values = (f"{value:g}" for value in record.results.values())
        table.add_row(escape(record.case), record.variant, *sizes, *values)
    return table
