"""``fusco bench rails`` and ``fusco bench offload``: several NICs, or PCIe links, of a host as one."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import closing
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer
from rich.markup import escape

from fusco.bench.names import MAX_CASE_S
from fusco.cli import options
from fusco.cli.reports import Column, report, table_of
from fusco.cli.running import new_console
from fusco.cli.tables import ResultTable, describe_origin

if TYPE_CHECKING:
    from fusco.bench.offload.copies import OffloadRecord
    from fusco.bench.rails.record import RailsRecord

_CaseRecord = TypeVar("_CaseRecord", "OffloadRecord", "RailsRecord")


_RAILS_COLUMNS: tuple[Column, ...] = (
    ("case", lambda of: escape(of.case)),
    ("policy", lambda of: escape(of.policy)),
)
_OFFLOAD_COLUMNS: tuple[Column, ...] = (
    ("case", lambda of: escape(of.case)),
    ("variant", "{.variant}"),
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
    _run(run_suite(names, policies, (num_rails, rate), seconds), without, _RAILS_COLUMNS, ",.3g", ("pyroute2",), json)


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

    from fusco.bench.offload import copies

    names = options.choose_names(only, list(copies.BENCHMARKS), "only")
    if not torch.cuda.is_available():
        raise ValueError("this machine has no GPU that PyTorch can use")
    without = f"{', '.join(names)}: this needs two GPUs, and there is one"
    _run(copies.run(names), without, _OFFLOAD_COLUMNS, "g", ("torch",), json)


def _run(
    measuring: Generator[_CaseRecord, None, None],
    without: str,
    columns: Sequence[Column],
    form: str,
    packages: tuple[str, ...],
    json: Path | None,
) -> None:
    """Measure all cases, show which is the latest one meanwhile, and report them: a table for each benchmark.

    Results are formatted by ``form`` unless they are whole. ``ValueError`` with the text ``without`` if there are no
    records.
    """
    console = new_console(json)
    records: list[_CaseRecord] = []
    with closing(measuring), console.status("starting") as status:
        for record in measuring:
            records.append(record)
            status.update(escape(f"{record.benchmark}: {record.case}"))
    if not records:
        raise ValueError(without)
    report(records, [*_tables(records, columns, form), describe_origin(records[0], 1, packages)], console, json)


def _tables(records: Sequence[OffloadRecord | RailsRecord], columns: Sequence[Column], form: str) -> list[ResultTable]:
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
