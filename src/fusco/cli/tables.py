"""Tables as all commands print them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table

if TYPE_CHECKING:
    from fusco.bench.harness.environment import Measurement


def new_table(title: str, columns: Sequence[str], notes: Sequence[str] = (), *, left: Sequence[str] = ("",)) -> Table:
    """Return a table without rows; columns are flushed right unless they are in ``left``, and notes are below it.

    On a narrow terminal names on the left stay whole, and all other cells take more lines: nothing is left out.
    """
    table = Table(title=title, title_justify="left", caption="\n".join(notes) or None, caption_justify="left")
    for name in columns:
        is_left = name in left
        is_name = is_left and name != columns[-1]  # a last column is a list
        table.add_column(name, justify="left" if is_left else "right", overflow="fold", no_wrap=is_name)
    return table


def verified_cell(is_right: bool) -> str:
    """Return the cell that says whether a record is verified."""
    return "[green]yes[/]" if is_right else "[red]NO[/]"


def describe_origin(record: Measurement, num_ranks: int, packages: tuple[str, ...] = ("torch",)) -> str:
    """Describe the GPUs, one for each rank unless they share some, or the processor; packages; the commit."""
    of = record.hardware
    machine = f"{num_ranks} x {of['gpu']}" if "gpu" in of else f"{of['cpu']}, {of['num_cores']} cores"
    if int(of.get("num_gpus", num_ranks)) < num_ranks:
        machine = f"{num_ranks} ranks that share {of['num_gpus']} x {of['gpu']}"
    source = f"fusco {record.versions['fusco']}" if record.commit == "none" else f"commit {record.commit}"
    return "; ".join([machine, *(f"{name} {record.versions[name]}" for name in packages), source])
