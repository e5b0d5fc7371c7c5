"""``fusco doctor``: what this machine can run, what is missing, and how to get it."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table


def doctor(
    json: Annotated[bool, typer.Option("--json", help="Print JSON lines instead of a table.")] = False,
) -> None:
    """Say what this machine can run and what is missing; exit code 1 if not even the CPU backend would work."""
    from fusco.cli.checkup import examine

    findings = examine()
    if json:
        for finding in findings:
            print(finding.to_json())  # noqa: T201  for programs, so nothing but the line
    else:
        table = Table(title="fusco doctor", title_justify="left", show_lines=False)
        for name in ("check", "", "found", "what to do"):
            table.add_column(name, overflow="fold")
        for finding in findings:
            colour = {"ok": "green", "missing": "red", "optional": "yellow"}[finding.state]
            # Escaped: a remedy may name an extra in brackets, which is no markup.
            table.add_row(finding.check, f"[{colour}]{finding.state}[/]", escape(finding.found), escape(finding.remedy))
        Console().print(table)
    if any(finding.state == "missing" for finding in findings):
        raise typer.Exit(1)
