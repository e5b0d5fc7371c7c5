"""Tables as all commands print them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement as Extent, measure_renderables
from rich.table import Table
from rich.text import Text

from fusco.cli.wording import plural

if TYPE_CHECKING:
    from fusco.bench.harness.environment import Measurement

_BORDER = 1  # columns of a terminal for the left edge of a table, and
_PADDING = 3  # for the edge and the spaces of each column


@dataclass(frozen=True)
class ResultTable:
    """A table of results; columns are flushed right unless they are in ``left``, and notes are below it.

    Cells of columns that are flushed right are numbers, and are never wrapped or cut. On a terminal that is too narrow
    headings and texts wrap at spaces. If that is not enough, the table is printed in parts, one below the other: each
    has the names, which are the columns on the left before all others, and as many of the other columns as fit. A row
    with nothing in a part is not in it. Names wrap if no other column fits beside them, and where that is not enough,
    a part is a list.
    """

    title: str
    columns: Sequence[str]
    notes: Sequence[str] = ()
    left: Sequence[str] = ("",)
    _rows: list[tuple[Sequence[str], bool]] = field(default_factory=list)

    def add_row(self, *cells: str, end_section: bool = False) -> None:
        """Add cells for the first columns, the others are empty; ``end_section`` draws a line below them."""
        self._rows.append(([*cells, *[""] * (len(self.columns) - len(cells))], end_section))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the title, the table or its parts, and the notes."""
        if self.title:
            yield Text.from_markup(self.title, style="table.title")
        extents = [self._extent(console, options, i) for i in range(len(self.columns))]
        whole_names = [Extent(most, most) for _, most in extents[: self._num_names]]
        widest = max(extents[self._num_names :], key=lambda extent: extent.minimum)
        if _total([*whole_names, widest]) <= options.max_width:
            extents[: self._num_names] = whole_names
        for part in self._parts(extents, options.max_width):
            chosen = [extents[i] for i in part]
            fits = _total(chosen) <= options.max_width
            yield self._part(part, _widths(chosen, options.max_width)) if fits else self._list(part)
        for note in self.notes:
            yield Text.from_markup(note, style="table.caption")

    @property
    def _num_names(self) -> int:
        """Number of columns that all parts have: the first, and others on the left, unless no other column is left."""
        on_the_right = (i for i, name in enumerate(self.columns) if name not in self.left)
        return max(1, next(on_the_right, 1))

    def _extent(self, console: Console, options: ConsoleOptions, column: int) -> Extent:
        """Return the least width of a column, and that without any wrapping."""
        unlimited = options.update(max_width=1 << 16)
        heading = Extent.get(console, unlimited, self.columns[column])
        cells = measure_renderables(console, unlimited, [cells[column] for cells, _ in self._rows] or [""])
        is_text = self.columns[column] in self.left
        return Extent(
            max(heading.minimum, cells.minimum if is_text else cells.maximum), max(heading.maximum, cells.maximum)
        )

    def _parts(self, extents: Sequence[Extent], width: int) -> Iterator[list[int]]:
        """Divide the columns among tables that fit."""
        names = list(range(self._num_names))
        part = [*names]
        for i in range(len(names), len(extents)):
            if len(part) > len(names) and _total([extents[each] for each in [*part, i]]) > width:
                yield part
                part = [*names]
            part.append(i)
        yield part

    def _part(self, part: Sequence[int], widths: Sequence[int]) -> Table:
        table = Table()
        for i, width in zip(part, widths, strict=True):
            is_left = self.columns[i] in self.left
            table.add_column(self.columns[i], justify="left" if is_left else "right", overflow="fold", width=width)
        for cells, ends_section in self._rows:
            if any(cells[i] for i in part[self._num_names :]):
                table.add_row(*(cells[i] for i in part), end_section=ends_section)
        return table

    def _list(self, part: Sequence[int]) -> Text:
        """Return a line for each row: its names, and heading and cell of each other column."""
        names, others = part[: self._num_names], part[self._num_names :]
        lines = [
            " ".join([*(cells[i] for i in names), *(f"{' '.join(self.columns[i].split())} {cells[i]}" for i in others)])
            for cells, _ in self._rows
        ]
        return Text.from_markup("\n".join(lines))


def _total(extents: Sequence[Extent]) -> int:
    """Return the least width of a table with these columns."""
    return _BORDER + sum(extent.minimum + _PADDING for extent in extents)


def _widths(extents: Sequence[Extent], width: int) -> list[int]:
    """Return the width of each column of a table that fits: what it needs, narrow columns first.

    >>> _widths([Extent(3, 3), Extent(4, 5), Extent(4, 90), Extent(4, 90)], 48)
    [3, 5, 13, 14]
    """
    widths, left = [extent.minimum for extent in extents], width - _total(extents)
    missing = sorted((extent.maximum - extent.minimum, i) for i, extent in enumerate(extents))
    for num_done, (more, i) in enumerate(missing):
        given = min(more, left // (len(missing) - num_done))
        widths[i] += given
        left -= given
    return widths


def headline(times: Mapping[str, float], ours: str, what: str = "", remark: str = "verified") -> str:
    """Return the finding of a case in a sentence: our time in ms beside the best other, and what that means.

    >>> headline({"fusco": 4.7, "baseline": 17.5, "ring": 30.0}, "fusco", "zipf")
    'zipf: fusco 4.70 ms, baseline 17.50 ms: 3.7 times as fast, verified'
    >>> headline({"fusco": 0.52, "baseline": 0.4}, "fusco", remark="NOT VERIFIED")
    'fusco 0.520 ms, baseline 0.400 ms: takes 1.3 times as long, NOT VERIFIED'
    """
    others = {name: ms for name, ms in times.items() if name != ours and ms > 0}
    texts = [f"{ours} {three_digits(times[ours])} ms"]
    finding = [remark]
    if others:
        best = min(others, key=lambda name: others[name])
        texts.append(f"{best} {three_digits(others[best])} ms")
        ratio = others[best] / times[ours]
        finding.insert(0, f"{ratio:.1f} times as fast" if ratio >= 1 else f"takes {1 / ratio:.1f} times as long")
    return f"{f'{what}: ' * bool(what)}{', '.join(texts)}: {', '.join(finding)}"


def three_digits(ms: float) -> str:
    """Return a time of at least three digits."""
    return f"{ms:.3f}" if ms < 1 else f"{ms:,.2f}"


def verified(is_right: bool) -> str:
    """Return the remark on results in a headline."""
    return "verified" if is_right else "NOT VERIFIED"


def conclusion(text: str) -> Text:
    """Return the sentence that a command's output ends with."""
    return Text(text, style="bold")


def verified_cell(is_right: bool) -> str:
    """Return the cell that says whether a record is verified."""
    return "[green]yes[/]" if is_right else "[red]NO[/]"


def describe_origin(record: Measurement, num_ranks: int, packages: tuple[str, ...] = ("torch",)) -> str:
    """Describe the GPUs, one for each rank unless they share some, or the processor; packages; the commit."""
    of = record.hardware
    num_cores = int(of.get("num_cores", 1))
    machine = f"{num_ranks} x {of['gpu']}" if "gpu" in of else f"{of['cpu']}, {plural(num_cores, 'core')}"
    if int(of.get("num_gpus", num_ranks)) < num_ranks:
        machine = f"{num_ranks} ranks that share {of['num_gpus']} x {of['gpu']}"
    source = f"fusco {record.versions['fusco']}" if record.commit == "none" else f"commit {record.commit}"
    return "; ".join([machine, *(f"{name} {record.versions[name]}" for name in packages), source])


def shape_of(num_nodes: int, ranks_per_node: int) -> str:
    """Return the nodes and ranks of a run.

    >>> shape_of(1, 2)
    '1 node x 2 ranks'
    """
    return f"{plural(num_nodes, 'node')} x {plural(ranks_per_node, 'rank')}"
