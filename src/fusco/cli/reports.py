"""Reports of benchmarks: tables made of records, errors, JSON lines, the exit code."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import typer
from rich.console import Console, RenderableType
from rich.text import Text

from fusco.bench.harness.json_lines import write_json_lines
from fusco.cli.explore.command import write_records
from fusco.cli.tables import ResultTable, conclusion, headline, three_digits, verified, verified_cell
from fusco.cli.wording import plural

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
        cells = (_cell(cell, record) for _, cell in columns)
        table.add_row(*cells, end_section=after is None or section(after) != section(record))
    return table


@dataclass(frozen=True)
class Comparison:
    """The variants of one case: the fastest of fusco's, and the times in ms of it and of all others.

    Without parts of fusco, "no-...", a variant is no other.
    """

    name: str
    ours: str
    times: Mapping[str, float]
    remark: str

    @property
    def gain(self) -> float:
        """Time of the fastest other over ours; infinite without another."""
        return min((ms for name, ms in self.times.items() if name != self.ours), default=inf) / self.times[self.ours]

    def text(self) -> str:
        """Return the finding in a sentence."""
        return headline(self.times, self.ours, self.name, self.remark)


def compare(records: Sequence[Any], ms: str, case: Callable[[Any], str]) -> list[Comparison]:
    """Compare variants in each case that has one of fusco's; ``ms`` is the field of the time, 0 if there is none."""
    found = []
    for name, of_case in _by_case(records, case).items():
        times = {each.variant: getattr(each, ms) for each in of_case if not each.variant.startswith("no-")}
        times = {variant: time for variant, time in times.items() if time}
        mine = [variant for variant in times if variant.startswith("fusco")]
        if mine:
            ours = min(mine, key=lambda variant: times[variant])
            others = {variant: time for variant, time in times.items() if variant == ours or variant not in mine}
            is_right = all(getattr(each, "is_right", True) for each in of_case)
            found.append(Comparison(name, ours, others, verified(is_right)))
    return found


def headlines(records: Sequence[Any], ms: str, case: Callable[[Any], str]) -> list[Text]:
    """Return the finding of each case."""
    return [conclusion(each.text()) for each in compare(records, ms, case)]


def least_gain(found: Sequence[Comparison]) -> Text:
    """Return the finding of the case in which ours gains least.

    >>> times = {"even": {"fusco": 1.0, "torch": 2.0}, "skewed": {"fusco": 1.0, "torch": 1.5}}
    >>> str(least_gain([Comparison(name, "fusco", of, "verified") for name, of in times.items()]))
    'skewed: fusco 1.00 ms, torch 1.50 ms: 1.5 times as fast, verified; the least of 2 cases'
    """
    if not found:
        return conclusion("no comparison: none of fusco's variants is verified")
    of = f"; the least of {len(found)} cases" * (len(found) > 1)
    return conclusion(min(found, key=lambda each: each.gain).text() + of)


def table_of_cases(
    records: Sequence[Any], title: str, names: Sequence[Column], ms: str, notes: Sequence[str] = ()
) -> ResultTable:
    """Return a table with a row for each case, which ``names`` tell apart, and a column for each variant's time."""
    case = case_of(names)
    gains = {each.name: each.gain for each in compare(records, ms, case)}

    def time(variant: str) -> Column:
        def cell(of: Sequence[Any]) -> str:
            return next(
                (three_digits(value) for each in of if each.variant == variant and (value := getattr(each, ms))), "-"
            )

        return f"{variant}\nms", cell

    columns: tuple[Column, ...] = (
        *((head, partial(_cell_of_first, cell)) for head, cell in names),
        *map(time, dict.fromkeys(record.variant for record in records)),
        ("best other\n/ fusco", lambda of: f"{gain:.2f}" if 0 < (gain := gains.get(case(of[0]), 0)) < inf else "-"),
        ("verified", lambda of: verified_cell(all(each.is_right for each in of))),
    )
    return table_of(list(_by_case(records, case).values()), title, columns, notes, left=[head for head, _ in names])


def table_of_variants(
    records: Sequence[Any], title: str, names: Sequence[Column], columns: Sequence[Column], notes: Sequence[str] = ()
) -> ResultTable:
    """Return a table with a row for each variant of each case, of which ``names`` are in its first row alone."""
    case = case_of(names)
    firsts = [of[0] for of in _by_case(records, case).values()]

    def once(head: str, cell: str | Callable[[Any], str]) -> Column:
        return head, lambda record: _cell(cell, record) if any(record is each for each in firsts) else ""

    shown = (*(once(*name) for name in names), ("variant", "{.variant}"), *columns)
    return table_of(records, title, shown, notes, left=[*(head for head, _ in names), "variant"], section=case)


def case_of(names: Sequence[Column]) -> Callable[[Any], str]:
    """Return what tells the case of a record, by the cells of ``names``."""
    return lambda record: ", ".join(_cell(cell, record) for _, cell in names)


def timed(ms: str, form: str) -> Callable[[Any], str]:
    """Return what makes a cell of a figure that only records with a time have, those that are verified."""
    return lambda record: form.format(record) if getattr(record, ms) else "-"


def left_out(skipped: Mapping[str, str], num_slow: int = 0) -> str:
    """Return what ``--explain`` shows besides: why variants cannot run, figures, iterations or ranks that are slow."""
    not_run = f"not run here: {', '.join(skipped)}; " * bool(skipped)
    slow = f", {plural(num_slow, 'slow iteration')} among them" * bool(num_slow)
    return f"{not_run}--explain shows all figures{slow}"


def _by_case(records: Sequence[Any], case: Callable[[Any], str]) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for record in records:
        found.setdefault(case(record), []).append(record)
    return found


def _cell(cell: str | Callable[[Any], str], record: Any) -> str:
    return cell.format(record) if isinstance(cell, str) else cell(record)


def _cell_of_first(cell: str | Callable[[Any], str], of: Sequence[Any]) -> str:
    return _cell(cell, of[0])


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
        console.print(each, soft_wrap=isinstance(each, Text))
    for record in records:
        for error in getattr(record, "errors", ()):
            console.print(f"[red]{name(record)}: {error}[/]")
    write_json_lines(records, json)
    write_records(records, html, views)
    if not all(getattr(record, "is_right", True) for record in records):
        raise typer.Exit(1)
