"""Reports of benchmarks: tables made of records, errors, JSON lines, the exit code."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import typer
from rich.console import Console, RenderableType
from rich.text import Text

from fusco.bench.harness.json_lines import write_json_lines
from fusco.cli.explore import write_records
from fusco.cli.tables import ResultTable, headline

Column = tuple[str, str | Callable[[Any], str]]  # a head, and what makes a cell of a record: a format or a function


def table_of(
    records: Sequence[Any],
    title: str,
    columns: Sequence[Column],
    notes: Sequence[str] = (),
    *,
    left: Sequence[str] = ("",),
    section: Callable[[Any], object] = lambda _: None,
) -> ResultTable:
    """Return a table with a row for each record, and a line below the last one of each section.

    >>> len(table_of([1.25, 2.5], "numbers", [("one", "{:.1f}"), ("double", lambda each: str(2 * each))])._rows)
    2
    """
    table = ResultTable(title, [head for head, _ in columns], notes, left=left)
    for record, after in zip(records, [*records[1:], None], strict=True):
        cells = (cell.format(record) if isinstance(cell, str) else cell(record) for _, cell in columns)
        table.add_row(*cells, end_section=after is None or section(after) != section(record))
    return table


def headlines(records: Sequence[Any], ms: str, case: Callable[[Any], str]) -> Iterator[Text]:
    """Yield for each case of records of variants a sentence: the fastest of fusco's beside the fastest other.

    ``ms`` is the field of the time; records without one are left out.
    """
    for name, group in groupby([record for record in records if getattr(record, ms)], key=case):
        of_case = list(group)
        # Without parts of fusco, "no-...", it is no rival.
        times = {each.variant: getattr(each, ms) for each in of_case if not each.variant.startswith("no-")}
        mine = [variant for variant in times if variant.startswith("fusco")]
        if mine:
            ours = min(mine, key=lambda variant: times[variant])
            rivals = {variant: time for variant, time in times.items() if variant == ours or variant not in mine}
            is_right = all(getattr(record, "is_right", True) for record in of_case)
            yield Text(headline(rivals, ours, name, is_right=is_right), style="bold")


def report(
    records: Sequence[Any],
    shown: Iterable[RenderableType],
    console: Console,
    json: Path | None,
    name: Callable[[Any], str] = str,
    html: Path | None = None,
    views: Sequence[Any] = (),
) -> None:
    """Print what is shown and the errors of records, with their names; write records; exit code 1 if one is wrong.

    ``html`` is a page of the records, and of ``views`` besides.
    """
    for each in shown:
        console.print(each)
    for record in records:
        for error in getattr(record, "errors", ()):
            console.print(f"[red]{name(record)}: {error}[/]")
    write_json_lines(records, json)
    write_records(records, html, views)
    if not all(getattr(record, "is_right", True) for record in records):
        raise typer.Exit(1)
