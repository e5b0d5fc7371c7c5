"""Compare the times of two commits: ``python tools/compare_commits.py OLD NEW [--runs N] -- bench host --calls 300``.

What follows ``--`` are arguments of ``fusco``. Both commits run them in turn, the first one alternating, so that slow
moments of the machine meet both; the least of the runs counts. Prints a Markdown table of all fields in us and ms. Exit
code 1 if a run failed.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from parts import read_records

_UNITS = ("_us", "_ms")
_ORIGIN = ("versions", "hardware", "commit")


def times_of(records: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Return each time above 0 by its name: what the record is of, and the field.

    >>> times_of([{"variant": "exact", "num_ranks": 2, "pair_us": 7.5, "commit": "abc", "step_us": {"rest": 1.0}}])
    {'num_ranks=2, variant=exact: pair_us': 7.5}
    """
    found: dict[str, float] = {}
    for record in records:
        case = {
            name: value
            for name, value in record.items()
            if isinstance(value, (str, int)) and not name.endswith(_UNITS) and name not in _ORIGIN
        }
        label = ", ".join(f"{name}={case[name]}" for name in sorted(case))
        for name, value in record.items():
            if name.endswith(_UNITS) and isinstance(value, (int, float)) and value > 0:
                found[f"{label}: {name}"] = float(value)
    return found


def summarize(old: Mapping[str, float], new: Mapping[str, float]) -> str:
    """Return a Markdown table of the times that both commits have; what all cases have in common is left out."""
    both = [name for name in old if name in new]
    words = [set(name.partition(": ")[0].split(", ")) for name in both]
    common = set.intersection(*words) if len(set(map(frozenset, words))) > 1 else set()
    lines = ["| case | time | old | new | new / old |", "| --- | --- | ---: | ---: | ---: |"]
    for name in both:
        case, _, field = name.rpartition(": ")
        shown = ", ".join(word for word in case.split(", ") if word not in common)
        lines.append(f"| {shown} | {field} | {old[name]:.2f} | {new[name]:.2f} | {new[name] / old[name]:.3f} |")
    return "\n".join(lines) + "\n"


def _run(source: Path, arguments: list[str], records: Path) -> dict[str, float]:
    command = [sys.executable, "-m", "fusco", *arguments, "--json", str(records)]
    environment = {**os.environ, "PYTHONPATH": str(source / "src")}
    subprocess.run(command, check=True, cwd=source, env=environment, stdout=subprocess.DEVNULL)  # noqa: S603
    return times_of(read_records(records))


def main() -> int:
    """Measure both commits in turn and print the least times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commits", nargs=2, metavar="COMMIT")
    parser.add_argument("--runs", type=int, default=5)
    own, _, arguments = " ".join(sys.argv[1:]).partition(" -- ")
    chosen = parser.parse_args(own.split())
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory() as folder:
        sources = {name: Path(folder) / name for name in ("old", "new")}
        least: dict[str, dict[str, float]] = {name: {} for name in sources}
        try:
            for source, commit in zip(sources.values(), chosen.commits, strict=True):
                subprocess.run(["git", "worktree", "add", "--detach", str(source), commit], check=True)  # noqa: S603, S607
            for number in range(chosen.runs):
                for name in sorted(sources, reverse=number % 2 == 0):
                    times = _run(sources[name], arguments.split(), Path(folder) / f"{name}{number}.jsonl")
                    least[name] = {case: min(took, least[name].get(case, took)) for case, took in times.items()}
        except subprocess.CalledProcessError as error:
            sys.stderr.write(f"{error}\n")
            return 1
        except KeyboardInterrupt:
            sys.stderr.write("interrupted: these are the runs until then\n")
        finally:
            for source in sources.values():
                subprocess.run(["git", "worktree", "remove", "--force", str(source)], check=False)  # noqa: S603, S607
        sys.stdout.write(summarize(least["old"], least["new"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
