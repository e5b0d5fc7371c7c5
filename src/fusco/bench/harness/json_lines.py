"""Records as JSON lines, in a file or on stdout."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fusco.bench.names import STDOUT
from fusco.core.files import written_beside

if TYPE_CHECKING:
    from _typeshed import DataclassInstance  # exists for type checkers only


_NO_JSON = re.compile("NaN|Infinity")  # that json writes nevertheless


def write_json_lines(records: Sequence[DataclassInstance], path: Path | None, *, appends: bool = False) -> None:
    """Write records (dataclasses), one JSON object a line, in place of the file or at its end, where it grows in place.

    ``-`` means stdout; without a path nothing is written. Numbers that JSON lacks, NaN and infinity, are ``null``.
    """
    if path is None:
        return
    text = "".join(_as_strict_json(asdict(record)) + "\n" for record in records)
    if path == STDOUT:
        sys.stdout.write(text)
        sys.stdout.flush()  # processes take turns
    elif appends:
        with path.open("a", encoding="utf-8") as lines:
            lines.write(text)
    else:
        with written_beside(path) as beside:
            beside.write_text(text, encoding="utf-8")


def _as_strict_json(values: dict[str, Any]) -> str:
    text = json.dumps(values)
    return json.dumps(json.loads(text, parse_constant=lambda _: None)) if _NO_JSON.search(text) else text
