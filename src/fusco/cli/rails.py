"""``fusco rails``: who uses whose NIC on this host, live."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.live import Live

from fusco.bench.harness.json_lines import write_json_lines
from fusco.cli import options
from fusco.cli.running import new_console
from fusco.cli.tables import ResultTable
from fusco.cli.wording import plural
from fusco.core.errors import SharedMemoryError

if TYPE_CHECKING:
    from fusco.rails.board import RailUse


def _check_board(path: Path | None) -> Path | None:
    """Refuse a file that is not a board: an empty one would be made a board, and removed at the end."""
    if path and not path.stat().st_size:
        raise typer.BadParameter("it is empty, and not a board of rails")
    return path


def rails(
    once: Annotated[bool, typer.Option("--once", help="Watch for one interval, print, and end.")] = False,
    interval: Annotated[float, typer.Option(min=0.05, max=60, help="Seconds between updates.")] = 1.0,
    board: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            callback=_check_board,
            help="File of the board. Default: this user's and namespace's.",
        ),
    ] = None,
    links: Annotated[
        bool, typer.Option("--links", help="PCIe links of GPUs (fusco.offload) instead of NICs; a worker is a GPU.")
    ] = False,
    json: options.JsonFile = None,
) -> None:
    """Show which workers use which rails (NICs) of this host, and how fast: live, or line by line without a terminal.

    With --json, JSON lines: one for each worker and rail that it owns or has used, at every update.
    """
    from fusco.rails.board import UsageReader

    if links:
        from fusco.core.files import links_board

        board = board or links_board()
    try:
        console, reader = new_console(json), UsageReader(board)
    except SharedMemoryError as error:
        raise ValueError(str(error)) from error  # the user's file
    with ExitStack() as ending:
        ending.callback(reader.close)
        reader.read()
        live = None
        if console.is_terminal and not once:
            live = ending.enter_context(Live(console=console, auto_refresh=False, transient=True))
        while True:
            time.sleep(interval)
            uses = reader.read()
            write_json_lines(uses, json, appends=True)
            shown = _table(uses, links=links)
            console.print(shown) if live is None else live.update(shown, refresh=True)
            if once:
                return


def _table(uses: list[RailUse], *, links: bool) -> ResultTable | str:
    title, rail, worker = ("PCIe links of GPUs", "link", "GPU") if links else ("rails", "rail", "worker")
    if not uses:
        return f"{title} of this host: no {worker} is registered"
    columns = (rail, "Gbit/s", worker, "pid", "use", "sends\nMB/s", "receives\nMB/s", "chunks\nout", "borrowed")
    moved = sum(use.sent_mb_per_s + use.received_mb_per_s for use in uses)
    borrowed = len({use.rail for use in uses if not use.is_owner})
    found = f"{plural(len(uses), 'use')} of {plural(len({use.rail for use in uses}), rail)}, {borrowed} borrowed"
    table = ResultTable(f"{title} of this host", columns, [f"{found}: {moved:,.0f} MB/s"], left=(rail, "use"))
    for i, use in enumerate(uses):
        is_first = not i or uses[i - 1].rail != use.rail
        is_last = i + 1 == len(uses) or uses[i + 1].rail != use.rail
        table.add_row(
            f"{use.rail} {use.interface}" if is_first else "",
            f"{use.bits_per_s / 1e9:g}" if is_first and use.bits_per_s else "",
            str(use.worker),
            str(use.pid),
            "owns" if use.is_owner else "borrows",
            f"{use.sent_mb_per_s:,.0f}",
            f"{use.received_mb_per_s:,.0f}",
            str(use.outstanding),
            str(use.borrowed),
            end_section=is_last,
        )
    return table
