"""``python -m check_architectures``: every architecture's files, biases and gradients, and the page's table."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import transformers
from fsdp_architecture_jobs import LIMIT, compare, is_within_limit
from fsdp_architectures import EXCEPTIONS, find_kinds
from fsdp_balance_jobs import biases_of_page, update_all_kinds
from fsdp_names_jobs import wrong_files
from fsdp_runs import import_models
from limited_world import LimitedWorld
from rich.console import Console
from rich.table import Table

from fusco.bench.harness.environment import commit, hardware
from fusco.bench.ranks.local_world import PRELOADED

_DOCS = Path(__file__).parents[2] / "docs"
RECORDS, PAGE = _DOCS / "data" / "architectures.jsonl", _DOCS / "training" / "architectures.md"
_LIMIT_S = 300.0  # for an architecture: the first one compiles kernels

Record = dict[str, Any]


def main() -> int:
    """Check the architectures named, or all; the exit code is 1 if one is wrong."""
    options = _options()
    console = Console(highlight=False, soft_wrap=True, markup=False)
    kind_to_record = {record["kind"]: record for record in read_records() if record["kind"] in find_kinds()}
    for number, (kind, record) in enumerate(_check(options.only), 1):
        kind_to_record[kind] = record
        console.print(f"{number:2} of {len(options.only)}  {kind}: {_describe(record)}")
        if "failure" not in record:
            _write(kind_to_record)
    table = Table("architecture", "dtype", "noise", "largest difference", "result")
    for kind in options.only:
        table.add_row(kind, *_cells(kind_to_record[kind]))
    console.print(table)
    wrong = [kind for kind in options.only if not is_right(kind_to_record[kind])]
    console.print(
        f"{len(options.only) - len(wrong)} of {len(options.only)} as expected; wrong: {', '.join(wrong) or 'none'}"
    )
    return bool(wrong)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="check_architectures", description=__doc__)
    parser.add_argument("--only", nargs="+", default=find_kinds(), choices=find_kinds(), metavar="KIND")
    return parser.parse_args()


def _check(kinds: Iterable[str]) -> Iterable[tuple[str, Record]]:
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"  # of the ranks
    PRELOADED.extend(["fsdp_architecture_jobs"])
    world, two, one = (LimitedWorld(num_ranks, import_models, _LIMIT_S) for num_ranks in (4, 2, 1))
    biases = {kind: place for place, kinds in biases_of_page().items() for kind in kinds}
    for kind in kinds:
        began = time.monotonic()
        try:
            with tempfile.TemporaryDirectory() as folder:
                assert one.run(wrong_files, kind, Path(folder)) == [[]]
            found, _ = two.run(update_all_kinds, [kind])
            assert found == {name: place for name, place in biases.items() if name == kind}, found
            compared, *_ = world.run(compare, kind)
            record = {"class": compared.root, "dtype": compared.dtype, "noise": _rounded(compared.noise)}
            record["differences"] = {way: _rounded(each) for way, each in compared.differences.items()}
            record["refused"] = ""
        except Exception as error:  # noqa: BLE001  any error is a finding
            record = {"class": "", "dtype": "", "noise": 0.0, "differences": {}, "refused": EXCEPTIONS.get(kind, "")}
            record |= {} if kind in EXCEPTIONS else {"failure": str(error)[-2000:]}
        yield kind, {"kind": kind, **record, "seconds": round(time.monotonic() - began, 1)}
    for each in (world, two, one):
        each.close()


def read_records() -> list[Record]:
    """Return the results of the last runs."""
    return [json.loads(line) for line in RECORDS.read_text().splitlines()[1:]] if RECORDS.exists() else []


def _write(kind_to_record: dict[str, Record]) -> None:
    machine = f"{hardware()['cpu']}, {hardware()['num_cores']} cores"
    packages = f"torch {torch.__version__}, transformers {transformers.__version__}"
    head = {"source": "make test-architectures", "date": time.strftime("%Y-%m-%d"), "commit": commit()}
    head |= {"hardware": f"{machine}; {packages}"}
    records = [kind_to_record[kind] for kind in sorted(kind_to_record)]
    RECORDS.write_text("".join(f"{json.dumps(each)}\n" for each in (head, *records)))
    PAGE.write_text(re.sub(r"(^\|.*\n)+", lambda _: render(records), PAGE.read_text(), count=1, flags=re.MULTILINE))


def is_right(record: Record) -> bool:
    """Return whether a result is what the page says: within the limit, or an exception."""
    if not record["differences"]:
        return bool(record["refused"])
    return is_within_limit(record["differences"], record["noise"])


def render(records: Iterable[Record]) -> str:
    """Return the table of the page."""
    rows: dict[str, list[str]] = {}
    for record in records:
        rows.setdefault(_outcome(record), []).append(record["kind"])
    ordered = sorted(rows.items(), key=lambda row: (row[0].startswith("no"), -len(row[1])))
    lines = [f"| {outcome} | {len(kinds)} | {', '.join(kinds)} |" for outcome, kinds in ordered]
    return "\n".join(["| trains | number | kinds |", "| --- | --- | --- |", *lines, ""])


def _outcome(record: Record) -> str:
    if not record["differences"]:
        return f"no: {record['refused']}"
    worst = max(record["differences"].values())
    return f"yes, in {record['dtype']} within {'5e-6' if worst <= LIMIT else 'twice its noise'}"


def _cells(record: Record) -> list[str]:
    result = "right" if is_right(record) else "WRONG"
    if not record["differences"]:
        return ["", "", "", "exception" if record["refused"] else "FAILED"]
    return [record["dtype"], f"{record['noise']:.1e}", f"{max(record['differences'].values()):.1e}", result]


def _describe(record: Record) -> str:
    if not record["differences"]:
        return f"FAILED: {record['failure']}" if "failure" in record else f"exception: {record['refused']}"
    worst = max(record["differences"].values())
    noise = f"one process with its batch in parts {record['noise']:.1e}"
    return f"{'right' if is_right(record) else 'WRONG'}, {record['dtype']}, {worst:.1e}, {noise}, {record['seconds']} s"


def _rounded(value: float) -> float:
    return float(f"{value:.2g}")


if __name__ == "__main__":
    sys.exit(main())
