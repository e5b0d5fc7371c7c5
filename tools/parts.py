"""Parts of a benchmark, one after the other: each a process of its own with a limit of its own."""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import fusco
from fusco.bench.harness.environment import commit
from fusco.core.files import written_beside

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True, kw_only=True)
class Part:
    """A command, and the seconds after which it is killed."""

    command: tuple[str, ...]
    limit_s: float
    records: Path | None = None  # a file of records that it writes anew
    folder: Path | None = None  # in which it runs
    environment: Mapping[str, str] = field(default_factory=dict)  # besides that of this process


@dataclass(frozen=True)
class Outcome:
    """How a part ended: done, failed, out of time or left out. After how many seconds."""

    how: str
    seconds: float


def run_parts(
    parts: Mapping[str, Part], out: Path, limit_s: float, *, resumes: bool = False, show: Callable[[str], str] = str
) -> dict[str, Outcome]:
    """Run parts one by one, each killed with its processes at its limit, or at the limit of all together.

    Args:
        parts: by name; the output of each is in NAME.txt.
        out: directory of their files, which is made.
        limit_s: of all parts, in seconds; a part that cannot begin before it is left out.
        resumes: leaves out parts that were done with the same command and commit.
        show: returns what is printed of a part's output.

    """
    out.mkdir(parents=True, exist_ok=True)
    path, deadline, outcomes = out / "ends.json", time.monotonic() + limit_s, {}
    ends = json.loads(path.read_text()) if resumes and path.exists() else {}
    for name, part in parts.items():
        start, log = time.monotonic(), out / f"{name}.txt"
        origin = [commit(), *(each.replace(str(out), "OUT") for each in part.command)]
        if ends.get(name) != ["done", *origin]:
            log.write_text("")
            left_s = min(part.limit_s, deadline - start)
            ends[name] = [_run_limited(part, log, left_s) if left_s > 0 else "left out", *origin]
            with written_beside(path) as beside:
                beside.write_text(json.dumps(ends))
        outcomes[name] = Outcome(ends[name][0], time.monotonic() - start)
        shown = show(log.read_text(errors="replace")) if log.exists() else ""
        sys.stdout.write(f"{name}: {outcomes[name].how} after {outcomes[name].seconds:.0f} s\n{shown}\n")
        sys.stdout.flush()
    return outcomes


def _run_limited(part: Part, log: Path, limit_s: float) -> str:
    """Run a part with its output in a file, and return how it ended; it is killed with all its processes."""
    if part.records:
        part.records.unlink(missing_ok=True)
    with (
        log.open("w") as out,
        subprocess.Popen(  # noqa: S603  the commands of these tools
            part.command,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd=part.folder,
            env={**os.environ, **part.environment},
        ) as process,
    ):
        try:
            return "done" if process.wait(limit_s) == 0 else "failed"
        except subprocess.TimeoutExpired:
            return "out of time"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # also ranks that outlive the process


def new_parser(description: str | None, out: str) -> argparse.ArgumentParser:
    """Return a parser of the options that all such tools have."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=description, formatter_class=raw)
    parser.add_argument("--out", type=Path, default=Path(out))
    parser.add_argument("--only", nargs="+", metavar="PART", help="names, or patterns such as 'decode-*'")
    parser.add_argument("--carried", type=folder, help="folder of what fusco does not contain")
    parser.add_argument("--site", type=Path, help="where to install the wheels; by default in the folder of --out")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--resume", action="store_true", help="run what was not done with the same command and commit")
    return parser


def choose(parts: Mapping[str, Part], chosen: argparse.Namespace, parser: argparse.ArgumentParser) -> dict[str, Part]:
    """Return the parts of ``--only``; ends the program if one does not exist."""
    found = {pattern: fnmatch.filter(parts, pattern) for pattern in chosen.only or ["*"]}
    if unknown := [pattern for pattern, names in found.items() if not names]:
        parser.error(f"no part {', '.join(sorted(unknown))} here: there are {', '.join(parts)}")
    return {name: part for name, part in parts.items() if any(name in names for names in found.values())}


def install(carried: Path, site: Path) -> None:
    """Install carried wheels into folders of ``site``, without a network."""
    for name in ("wheels", "peer"):
        wheels = sorted(map(str, (carried / name).glob("*.whl")))
        if wheels and not (site / name).exists():
            options = ("--quiet", "--no-index", "--no-deps", "--target", str(site / name))
            subprocess.run([sys.executable, "-m", "pip", "install", *options, *wheels], check=True)  # noqa: S603


def search_paths(*folders: Path, site: Path) -> dict[str, str]:
    """Return variables by which a part finds modules in folders, the wheels of ``site``, fusco, tools and libraries."""
    of_fusco = Path(fusco.__file__).parents[1]
    nvshmem = Path(torch.__file__).parents[1] / "nvidia" / "nvshmem" / "lib"  # DeepEP's library needs it
    nccl = site / "peer" / "nvidia" / "nccl" / "lib" / "libnccl.so.2"  # DeepEP 2 needs a newer one than PyTorch brings
    found = {
        "PYTHONPATH": (*folders, site / "wheels", of_fusco, ROOT / "tools", os.environ.get("PYTHONPATH")),
        "LD_LIBRARY_PATH": (nvshmem, os.environ.get("LD_LIBRARY_PATH")),
        "LD_PRELOAD": (nccl if nccl.exists() else None, os.environ.get("LD_PRELOAD")),
    }
    return {name: os.pathsep.join(map(str, filter(None, each))) for name, each in found.items()}


def finish(out: Path, summary: str, outcomes: Mapping[str, Outcome]) -> int:
    """Write and print a summary; return the exit code, 1 unless all parts were done."""
    (out / "summary.md").write_text(summary)
    sys.stdout.write(summary)
    return int(any(outcome.how != "done" for outcome in outcomes.values()))


def read_records(path: Path) -> list[dict[str, Any]]:
    """Return the records of a file of JSON lines, none of a file that does not exist."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def folder(name: str) -> Path:
    """Return the absolute path of a folder, an argument; raises ``ArgumentTypeError`` unless it exists."""
    if not Path(name).is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {name}")
    return Path(name).resolve()
