"""``fusco doctor``: what this machine can run, what is missing, and how to get it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from fusco.cli.options import check_writable
from fusco.cli.running import new_console

_STDOUT = Path("-")


def doctor(
    json: Annotated[
        Path | None,
        typer.Option(
            "--json",
            dir_okay=False,
            callback=check_writable,
            help="Also write JSON lines here; - prints them in place of the table.",
        ),
    ] = None,
) -> None:
    """Say what this machine can run and what is missing; exit code 1 if not even the CPU backend would work."""
    from fusco.cli.checkup import examine

    findings = examine()
    lines = "".join(finding.to_json() + "\n" for finding in findings)
    if json == _STDOUT:
        print(lines, end="")  # noqa: T201  for programs, so nothing but the lines
    else:
        table = Table(title="fusco doctor", title_justify="left", show_lines=False)
        for name in ("check", "", "found", "what to do"):
            table.add_column(name, overflow="fold")
        for finding in findings:
            colour = {"ok": "green", "missing": "red", "optional": "yellow"}[finding.state]
            # Escaped: a remedy may name an extra in brackets, which is no markup.
            table.add_row(finding.check, f"[{colour}]{finding.state}[/]", escape(finding.found), escape(finding.remedy))
        new_console().print(table)
        if json:
            json.write_text(lines, encoding="utf-8")
    if any(finding.state == "missing" for finding in findings):
        raise typer.Exit(1)
