"""``fusco schedule``: a matrix, its stages, and a Gantt chart of senders and receivers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.text import Text

from fusco.bench.harness.json_lines import write_json_lines
from fusco.bench.names import MatrixKind
from fusco.cli import options
from fusco.cli.running import new_console
from fusco.cli.tables import ResultTable, conclusion
from fusco.cli.wording import plural

if TYPE_CHECKING:
    from fusco.bench.schedule import ModeRecord
    from fusco.core.lanes import IntArray

_MAX_ROWS = 24  # of a table; a screenful
_MAX_NODES = 256  # their exact stages, up to 65,026 of 256 pairs each, fit into memory
_OF_MADE = ("--nodes", "--matrix", "--skew", "--largest", "--seed")  # options of a matrix that is made

# Mode of the stages to show; "auto" is the one with the shortest modelled time.
ShownMode = Literal["auto", "exact", "few", "spread-out"]


def schedule(
    context: typer.Context,
    *,
    nodes: Annotated[int, typer.Option(min=1, max=_MAX_NODES, help="Nodes of a generated matrix.")] = 4,
    matrix: Annotated[MatrixKind, typer.Option(help="Kind of a generated matrix.")] = "random",
    skew: options.Skew = 0.8,
    largest: Annotated[
        int, typer.Option(min=1, max=1 << 62, help="Largest entry of a generated matrix, in bytes.")
    ] = 100_000_000,
    seed: Annotated[int, typer.Option(min=0, help="Seed of a generated matrix.")] = 0,
    file: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="Read the matrix of bytes from here: .npy or .csv.")
    ] = None,
    mode: Annotated[ShownMode, typer.Option(help="Mode of the stages to show.")] = "auto",
    ranks_per_node: options.RanksPerNode = 8,
    latency_us: options.LatencyUs = 10.0,
    internode_gbs: options.InternodeGbs = 50.0,
    json: options.JsonFile = None,
) -> None:
    """Split the traffic between nodes into one-to-one stages, and show the senders and receivers of each.

    Pure computation: nothing is sent. JSON lines contain the stages of all modes.
    """
    from fusco.bench.inputs.matrices import load_matrix, make_matrix
    from fusco.bench.schedule import compare_modes
    from fusco.schedule import Links

    given = options.given_options(context)
    if file and (of_made := [name for name in _OF_MADE if name in given]):
        raise ValueError(f"{', '.join(of_made)}: for a matrix that is made, not one that --file reads")
    options.check_skew(given, "--matrix", [matrix])
    if file:
        name, node_bytes = str(file), load_matrix(file)
    else:
        name = matrix + (f" {skew:g}" if matrix == "zipf" else "")
        node_bytes = make_matrix(matrix, nodes, largest=largest, skew=skew, seed=seed)
    if len(node_bytes) > _MAX_NODES:
        raise ValueError(f"{name} has {len(node_bytes)} nodes, at most {_MAX_NODES} are scheduled here")
    links = Links(latency_us=latency_us, internode_gbs=internode_gbs)
    records = compare_modes(node_bytes, name, ranks_per_node, links)
    console = new_console(json)
    _print_matrix(node_bytes, name, console)
    if records[0].lower_bound_bytes:
        _print_modes(records, console)
        is_shown = [record.is_chosen if mode == "auto" else record.mode == mode for record in records]
        _print_stages(records[is_shown.index(True)], console)
        console.print(conclusion(_found(records)), soft_wrap=True)
    else:
        console.print("nothing to send: no node has bytes for another")
    write_json_lines(records, json)


def _print_matrix(node_bytes: IntArray, name: str, console: Console) -> None:
    num_nodes = len(node_bytes)
    title = f"[bold]{name}[/], {plural(num_nodes, 'node')}"
    if num_nodes > _MAX_ROWS:
        console.print(f"{title}: {node_bytes.sum() / 1e6:,.1f} MB in all, diagonal included")
        return
    columns = ["", *map(node_letter, range(num_nodes)), "sends"]
    table = ResultTable(f"{title}: MB from node (down) to node (across)", columns)
    for src, row in enumerate(node_bytes.tolist()):
        sizes = [0 if dst == src else size for dst, size in enumerate(row)]
        table.add_row(node_letter(src), *(f"{size / 1e6:.1f}" if size else "-" for size in [*sizes, sum(sizes)]))
    console.print(table)


def _print_modes(records: Sequence[ModeRecord], console: Console) -> None:
    bound = records[0].lower_bound_bytes
    title = f"lower bound: {bound / 1e6:,.1f} MB, what the busiest node sends or receives"
    one, columns = records[0], ("mode", "stages", "MB", "over lower bound", "modelled time")
    model = (
        f"model: {one.latency_us:g} us a stage, {one.internode_gbs:g} GB/s for each of {one.ranks_per_node} ranks a "
        "node; chosen by the size of the matrix"
    )
    table = ResultTable(title, columns, (model,), left=("mode",))
    for record in records:
        chosen = " (chosen)" if record.is_chosen else ""
        total, time_us = f"{record.total_bytes / 1e6:,.1f}", f"{record.modelled_us:,.0f} us"
        table.add_row(record.mode + chosen, str(record.num_stages), total, f"{record.ratio:.4f}", time_us)
    console.print(table)


def _found(records: Sequence[ModeRecord]) -> str:
    """Return how long the chosen mode takes by the model, and the next best."""
    best, *others = sorted(records, key=lambda record: (not record.is_chosen, record.modelled_us))
    stages, over = plural(best.num_stages, "stage"), f"{best.ratio:.4g} times the lower bound"
    return (
        f"mode '{best.mode}': {stages}, {over}, {best.modelled_us:,.0f} us by the model; '{others[0].mode}' "
        f"{others[0].modelled_us:,.0f} us"
    )


def _print_stages(record: ModeRecord, console: Console) -> None:
    pairs_of = "who sends to whom"
    table = ResultTable(f"stages of mode '{record.mode}'", ("stage", "MB", pairs_of), left=(pairs_of,))
    stages, is_large = list(zip(record.dst_node, record.duration_bytes, strict=True)), record.num_nodes > NUM_LETTERS
    for stage, (dst_node, length) in enumerate(stages[:_MAX_ROWS]):
        pairs = [
            f"{src}>{dst}" if is_large else f"{node_letter(src)}>{node_letter(dst)}"
            for src, dst in enumerate(dst_node)
            if dst >= 0
        ]
        more = [f"and {len(pairs) - _MAX_ROWS} more"] if len(pairs) > _MAX_ROWS else []
        table.add_row(str(stage), f"{length / 1e6:,.2f}", " ".join(pairs[:_MAX_ROWS] + more))
    if len(stages) > _MAX_ROWS:
        table.add_row("...", "", f"and {len(stages) - _MAX_ROWS} more")
    console.print(table)
    others = f", # for nodes from {NUM_LETTERS} on" if is_large else ""
    console.print(f"when each node sends (down) to which node (letters{others}), · while it sends nothing")
    width = max(20, console.width - 4)
    for line in draw_gantt(record.dst_node, record.num_bytes, record.duration_bytes, width, _MAX_ROWS):
        console.print(line, no_wrap=True, highlight=False, overflow="crop")
    if record.num_nodes > _MAX_ROWS:
        console.print(f"... and {record.num_nodes - _MAX_ROWS} more nodes")


_LETTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
NUM_LETTERS = len(_LETTERS)
_COLORS = ("blue", "green", "magenta", "cyan", "yellow", "red", "bright_blue", "bright_green", "bright_magenta")
_IDLE = "·"


def node_letter(node: int) -> str:
    """Return one character for a node: digits, then letters, then ``#`` for all others.

    >>> node_letter(3), node_letter(10), node_letter(99)
    ('3', 'A', '#')
    """
    return _LETTERS[node] if node < NUM_LETTERS else "#"


def draw_gantt(
    dst_node: Sequence[Sequence[int]],
    num_bytes: Sequence[Sequence[int]],
    duration_bytes: Sequence[int],
    width: int,
    max_nodes: int | None = None,
) -> list[Text]:
    """Return a ruler with a mark at the start of each stage, then a line for each node, ``width`` characters wide.

    With ``max_nodes``, only the first nodes have a line. The width of a stage is proportional to its length: the letter
    of the receiver while the node sends, dots while it waits. Stages shorter than a character are not visible.

    >>> for line in draw_gantt([[1, 0], [-1, 0]], [[6, 3], [0, 2]], [6, 2], width=8):
    ...     print(line)
       |     |
    0  111111··
    1  000···00
    """
    *begins, total = accumulate(duration_bytes, initial=0)

    def column(size: int) -> int:
        return (size * width + total // 2) // total if total else 0

    ruler = [" "] * width
    for begin in begins:
        ruler[min(column(begin), width - 1)] = "|"
    lines = [Text("   " + "".join(ruler).rstrip(), style="dim")]
    for node in range(len(dst_node[0]) if dst_node else 0)[:max_nodes]:
        line = Text(f"{node:<3}")
        for stage, begin in enumerate(begins):
            dst, size = dst_node[stage][node], num_bytes[stage][node]
            first, end = column(begin), column(begin + duration_bytes[stage])
            num_busy = column(begin + size) - first
            if dst >= 0:
                line.append(node_letter(dst) * num_busy, style=_COLORS[dst % len(_COLORS)])
            line.append(_IDLE * (end - first - (num_busy if dst >= 0 else 0)), style="dim")
        lines.append(line)
    return lines
