"""``fusco doctor``: the backends that this machine can run, what is missing, and how to install it."""

from __future__ import annotations

import typer
from rich.markup import escape
from rich.table import Table

from fusco.cli import options
from fusco.cli.running import new_console


def doctor(json: options.JsonFile = None) -> None:
    """Check what this machine can run and what is missing; exit code 1 if not even the CPU backend works."""
    from fusco.bench.json_lines import write_json_lines
    from fusco.cli.checkup import examine

    findings = examine()
    table = Table(title="fusco doctor", title_justify="left", show_lines=False)
    for name in ("check", "", "found", "what to do"):
        table.add_column(name, overflow="fold")
    for finding in findings:
        colour = {"ok": "green", "missing": "red", "optional": "yellow"}[finding.state]
        # Escaped: a remedy may name an extra in brackets, which is not markup.
        table.add_row(finding.check, f"[{colour}]{finding.state}[/]", escape(finding.found), escape(finding.remedy))
    new_console(json).print(table)
    write_json_lines(findings, json)
    if any(finding.state == "missing" for finding in findings):
        raise typer.Exit(1)
