"""Measure what docs/performance says of two GPUs: each part in a process of its own, with a limit of its own.

``python tools/bench_gpu.py [--out DIRECTORY] [--limit-s SECONDS] [--only PART ...]``, or ``make bench-gpu``. For every
part PART.txt has its tables and PART.jsonl its records; summary.md has one line for each record. Exit code 1 if a part
failed, ran out of time, or was left out because all together had.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

LIMIT_S = 480.0  # of all parts


class Part(NamedTuple):
    """Arguments of ``fusco``, and the seconds after which it is killed."""

    arguments: tuple[str, ...]
    limit_s: float


class Outcome(NamedTuple):
    """How a part ended, and after how many seconds."""

    how: str
    seconds: float


def shuffle(options: str, limit_s: float = 60.0) -> Part:
    """Return a part that measures dispatch and combine with uniform routing."""
    return Part(("bench", "shuffle", "--device", "cuda", "--traffic", "uniform", *options.split()), limit_s)


LARGE, SMALL = "--hidden 7168 --num-experts 256", "--hidden 2048 --num-experts 128"
WITHIN = "fusco,fusco-graph,baseline"
# The most important first: what is left out is at the end.
PARTS: dict[str, Part] = {
    **{f"h7168-t{n}": shuffle(f"{LARGE} --tokens {n} --variants {WITHIN}") for n in (128, 1024, 2048, 8192)},
    **{f"nodes-t{n}": shuffle(f"{LARGE} --tokens {n} --nodes 2") for n in (128, 1024)},
    "nodes-t8192": shuffle(f"{LARGE} --tokens 8192 --nodes 2 --iterations 10", 90.0),
    "train": Part(("train", "--preset", "large", "--device", "cuda", "--dispatcher", "both", "--steps", "30"), 120.0),
    **{f"h2048-t{n}": shuffle(f"{SMALL} --tokens {n} --variants {WITHIN}") for n in (128, 1024, 8192)},
    **{
        f"sms32-t{n}": shuffle(f"{LARGE} --tokens {n} --variants fusco,fusco-graph --num-sms 32")
        for n in (128, 1024, 8192)
    },
    "prefill": Part(
        ("bench", "prefill", "--device", "cuda", "--layers", "24", "--routing", "trace", "--iterations", "10"), 150.0
    ),
}


def run_parts(
    parts: Mapping[str, Part], out: Path, limit_s: float, command: Sequence[str] = (sys.executable, "-m", "fusco")
) -> dict[str, Outcome]:
    """Run parts one by one, each killed with its processes at its limit, or at the limit of all together.

    Args:
        parts: by name.
        out: directory of their files, which is made.
        limit_s: of all parts, in seconds; a part that cannot begin before it is left out.
        command: what the arguments follow.

    """
    out.mkdir(parents=True, exist_ok=True)
    deadline, outcomes = time.monotonic() + limit_s, {}
    for name, part in parts.items():
        start = time.monotonic()
        if start >= deadline:
            outcomes[name] = Outcome("left out", 0.0)
            continue
        tables, records = out / f"{name}.txt", out / f"{name}.jsonl"
        records.unlink(missing_ok=True)
        whole = [*command, *part.arguments, "--json", str(records)]
        outcomes[name] = Outcome(
            run_limited(whole, tables, min(part.limit_s, deadline - start)), time.monotonic() - start
        )
        sys.stdout.write(f"{name}: {outcomes[name].how} after {outcomes[name].seconds:.0f} s\n{tables.read_text()}\n")
        sys.stdout.flush()
    return outcomes


def folder(name: str) -> Path:
    """Return the absolute path of a folder, an argument; raises ``ArgumentTypeError`` unless it exists."""
    if not Path(name).is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {name}")
    return Path(name).resolve()


def run_limited(command: Sequence[str], tables: Path, limit_s: float) -> str:
    """Run a command with its output in a file, and return how it ended: done, failed or out of time.

    It is killed with all its processes at its limit.
    """
    with (
        tables.open("w") as log,
        subprocess.Popen(  # noqa: S603  the commands of this file
            command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        ) as process,
    ):
        try:
            return "done" if process.wait(limit_s) == 0 else "failed"
        except subprocess.TimeoutExpired:
            return "out of time"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # also ranks that outlive the process


def summarize(out: Path, outcomes: Mapping[str, Outcome]) -> str:
    """Return a Markdown table with a line for each record of each part, times in milliseconds."""
    lines = [
        "| part | variant | dispatch | combine | both | 20 in a row | idle to idle | verified |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, outcome in outcomes.items():
        records = _records(out / f"{name}.jsonl")
        lines += [_line(name, record) for record in records]
        if outcome.how != "done":
            lines.append(f"| {name} | {outcome.how} after {outcome.seconds:.0f} s | | | | | | |")
    return "\n".join(lines) + "\n"


def _records(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    records = [json.loads(line) for line in path.read_text().splitlines()]
    return [record for record in records if record.get("kind") not in ("step", "skipped")]


def _line(name: str, record: Mapping[str, Any]) -> str:
    if record.get("kind") == "run":  # of training: forward and backward of all layers, and the step
        dispatch, combine = (
            f"{record[f'{verb}_ms']:.2f} + {record[f'{verb}_backward_ms']:.2f}" for verb in ("dispatch", "combine")
        )
        return f"| {name} | {record['dispatcher']} | {dispatch} | {combine} | step {record['step_ms']:.1f} | | | |"
    if record.get("kind") == "prefill":  # all layers, and the time to the first token
        cells = [record["variant"], *(f"{record[f'{verb}_ms']:.2f}" for verb in ("dispatch", "combine"))]
        verified = "yes" if record["verified"] else "NO"
        return f"| {name} | {' | '.join(cells)} | {record['batch']}: {record['ttft_ms']:.1f} | | | {verified} |"
    names = ("dispatch_ms", "combine_ms", "total_ms", "loop_ms", "idle_ms")
    cells = ["-" if record.get(field) is None else f"{record[field]:.3f}" for field in names]
    return f"| {name} | {record['variant']} | {' | '.join(cells)} | {'yes' if record['verified'] else 'NO'} |"


def main() -> int:
    """Run the parts that were asked for and write their summary."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out/bench-gpu"))
    parser.add_argument("--limit-s", type=float, default=LIMIT_S)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    chosen = parser.parse_args()
    outcomes = run_parts({name: PARTS[name] for name in chosen.only}, chosen.out, chosen.limit_s)
    summary = summarize(chosen.out, outcomes)
    (chosen.out / "summary.md").write_text(summary)
    sys.stdout.write(summary)
    return int(any(outcome.how != "done" for outcome in outcomes.values()))


if __name__ == "__main__":
    sys.exit(main())
