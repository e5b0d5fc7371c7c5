"""Records as JSON lines, in a file or on stdout."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from fusco.bench.names import STDOUT

if TYPE_CHECKING:
    from _typeshed import DataclassInstance  # exists for type checkers only


def write_json_lines(records: Sequence[DataclassInstance], path: Path | None, *, appends: bool = False) -> None:
    """Write records (dataclasses), one JSON object a line, replacing or appending to the file.

    ``-`` means stdout; without a path nothing is written.
    """
    if path is None:
        return
    mode = "a" if appends else "w"
    with nullcontext(sys.stdout) if path == STDOUT else path.open(mode, encoding="utf-8") as lines:
        lines.writelines(json.dumps(asdict(record)) + "\n" for record in records)
        lines.flush()  # processes take turns
