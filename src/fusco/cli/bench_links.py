"""``fusco bench rails`` and ``fusco bench offload``: several NICs, or PCIe links, of a host as one."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.markup import escape

from fusco.bench.names import MAX_CASE_S
from fusco.cli import options
from fusco.cli.reports import Column, report, table_of
from fusco.cli.running import new_console
from fusco.cli.tables import ResultTable, conclusion, describe_origin

if TYPE_CHECKING:
    from fusco.bench.offload.copies import OffloadRecord
    from fusco.bench.rails.record import RailsRecord

_CaseRecord = TypeVar("_CaseRecord", "OffloadRecord", "RailsRecord")


Explain = Annotated[bool, typer.Option("--explain", help="Show all cases and results.")]
_Column = tuple[str, Callable[[Any], str]]
_RAILS_COLUMNS: tuple[_Column, ...] = (("case", lambda of: escape(of.case)), ("policy", lambda of: escape(of.policy)))
_OFFLOAD_COLUMNS: tuple[_Column, ...] = (
    ("case", lambda of: escape(of.case)),
    ("variant", lambda of: escape(of.variant)),
    ("MiB", lambda of: f"{of.num_bytes / 2**20:g}" if of.num_bytes else ""),
    ("launch MiB", lambda of: f"{of.chunk_bytes / 2**20:g}" if of.chunk_bytes else ""),
)


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
    explain: Explain = False,
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
    without = f"there is no case of {', '.join(names)} with {num_rails} rails for policy {', '.join(policies)}"
    measuring = run_suite(names, policies, (num_rails, rate), seconds)
    records = _measure(measuring, without, console := new_console(json))
    _print(records, _RAILS_COLUMNS, ",.3g", ("pyroute2",), console, explain=explain)
    report(records, [], console, json)


def offload(
    only: Annotated[
        list[str] | None,
        typer.Option(help="Benchmarks: sizes, variants, both-busy, owner, memory. Default: all, about a minute."),
    ] = None,
    json: options.JsonFile = None,
    explain: Explain = False,
) -> None:
    """Copy between a GPU and pinned host memory, verified, compared with cudaMemcpyAsync; GPU 1 is the idle one.

    Variants are those of FuseLink's Figure 6. Over the other GPU's link, its buffer is filled by threads (D1) or by a
    copy engine (D2); over the GPU's own link, threads (D3) or a copy engine (D4) write to host memory.
    """
    import torch

    from fusco.bench.offload import copies

    names = options.choose_names(only, list(copies.BENCHMARKS), "only")
    if not torch.cuda.is_available():
        raise ValueError("this machine has no GPU that PyTorch can use")
    without = f"{', '.join(names)}: this needs two GPUs, and there is one"
    records = _measure(copies.run(names), without, console := new_console(json))
    _print(records, _OFFLOAD_COLUMNS, "g", ("torch",), console, explain=explain)
    report(records, [], console, json)


def _measure(measuring: Generator[_CaseRecord, None, None], without: str, console: Console) -> list[_CaseRecord]:
    """Measure all cases, and show which is the latest one meanwhile; ``ValueError(without)`` if there is none."""
    records: list[_CaseRecord] = []
    with closing(measuring), console.status("starting") as status:
        for record in measuring:
            records.append(record)
            status.update(escape(f"{record.benchmark}: {record.case}"))
    if not records:
        raise ValueError(without)
    return records


def _print(
    records: Sequence[OffloadRecord | RailsRecord],
    columns: Sequence[_Column],
    form: str,
    packages: tuple[str, ...],
    console: Console,
    *,
    explain: bool,
) -> None:
    """Print a table for each benchmark, or one of the last case of each; and the finding of the first.

    Results are formatted by ``form`` unless they are whole.
    """
    lasts = {each.benchmark: [of for of in records if _case(of) == _case(each)] for each in records}
    shown = _tables(records, columns, form) if explain or len(lasts) == 1 else [_overview(lasts, columns[1], form)]
    for table in shown:
        console.print(table)
    console.print(describe_origin(records[0], 1, packages))
    of = next(iter(lasts.values()))
    name = next(iter(of[0].results))
    found = ", ".join(f"{columns[1][1](each)} {_result(name, form, each)}" for each in of)
    console.print(conclusion(f"{of[0].benchmark}, {of[0].case}: {name}: {found}"), soft_wrap=True)


def _case(record: OffloadRecord | RailsRecord) -> tuple[str, str, tuple[str, ...]]:
    return record.benchmark, record.case, tuple(record.results)


def _overview(cases: Mapping[str, Sequence[OffloadRecord | RailsRecord]], variant: _Column, form: str) -> ResultTable:
    """Return a table with the first result of a case of each benchmark, a column for each variant."""
    _, name_of = variant
    variants = list(dict.fromkeys(name_of(each) for of in cases.values() for each in of))
    left = ("benchmark", "of what")
    notes = ["the last case of each benchmark, its first result; --explain shows all"]
    table = ResultTable("", (left[0], *variants, left[1]), notes, left=left)
    for benchmark, of in cases.items():
        result = next(iter(of[0].results))
        cells = {name_of(each): _result(result, form, each) for each in of}
        values = [cells.get(name, "-") for name in variants]
        table.add_row(benchmark, *values, escape(f"{result}: {of[0].case}"))
    return table


def _tables(records: Sequence[OffloadRecord | RailsRecord], columns: Sequence[_Column], form: str) -> list[ResultTable]:
    """Return a table for each benchmark, with the columns given and those of its results."""
    case, variant = left = [head for head, _ in columns[:2]]
    tables: list[ResultTable] = []
    for _, group in groupby(records, key=lambda record: (record.benchmark, tuple(record.results))):
        of = list(group)
        results: list[Column] = [(name, partial(_result, name, form)) for name in of[0].results]
        has_several = len({getattr(record, variant) for record in of}) > 1
        section = (lambda record: getattr(record, case)) if has_several else (lambda _: None)
        tables.append(table_of(of, of[0].title, [*columns, *results], left=left, section=section))
    return tables


def _result(name: str, form: str, record: OffloadRecord | RailsRecord) -> str:
    value = record.results[name]
    return f"{value:,.0f}" if float(value).is_integer() else format(value, form)
