"""Records as JSON lines, in a file or on stdout."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fusco.bench.names import STDOUT

if TYPE_CHECKING:
    from _typeshed import DataclassInstance  # exists for type checkers only


_NO_JSON = re.compile("NaN|Infinity")  # that json writes nevertheless


def write_json_lines(records: Sequence[DataclassInstance], path: Path | None, *, appends: bool = False) -> None:
    """Write records (dataclasses), one JSON object a line, replacing or appending to the file.

    ``-`` means stdout; without a path nothing is written. Numbers that JSON lacks, NaN and infinity, are ``null``.
    """
    if path is None:
        return
    mode = "a" if appends else "w"
    with nullcontext(sys.stdout) if path == STDOUT else path.open(mode, encoding="utf-8") as lines:
        lines.writelines(_as_strict_json(asdict(record)) + "\n" for record in records)
        lines.flush()  # processes take turns


def _as_strict_json(values: dict[str, Any]) -> str:
    text = json.dumps(values)
    return json.dumps(json.loads(text, parse_constant=lambda _: None)) if _NO_JSON.search(text) else text
