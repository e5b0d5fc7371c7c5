"""Measure frameworks on two GPUs: DeepEP's own tests on fusco and on DeepEP, and training of Megatron's MoE layers.

``python tools/bench_frameworks.py [--deep-ep FOLDER] [--hybrid-ep FOLDER] [--peer FOLDER] [--out DIRECTORY]``

The tests are DeepEP's files, unchanged, which fusco does not contain: FOLDER is ``tests`` of a checkout of v1.2.1, and
of the branch hybrid-ep. ``--peer`` is a folder with DeepEP's package, such as ``pip install --target FOLDER`` makes;
without it only fusco is measured. Megatron-core must be installed. Every part is a process of its own with a limit of
its own; PART.txt has its output. Exit code 1 if a part failed or was killed.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import fusco
from bench_gpu import run_limited

ROOT = Path(__file__).parents[1]
OURS = Path(fusco.__file__).parent / "integrations" / "path"
# Lines that a summary shows: bandwidths of DeepEP's tests, checks, and what tools/megatron_steps.py prints.
SHOWN = ("Best", "default:", "PASS", "FAIL", "Error", "API", "GB/s", "losses", "_ms:")


class Part(NamedTuple):
    """A command, its folder, the folder of the module ``deep_ep`` that it finds, and the seconds until it is killed."""

    command: tuple[str, ...]
    folder: Path
    deep_ep: Path
    limit_s: float


def parts_of(deep_ep: Path | None, hybrid_ep: Path | None, peer: Path | None) -> dict[str, Part]:
    """Return the parts that can be run with these folders, by name, the most important first.

    >>> list(parts_of(Path("v1"), None, Path("site")))
    ['megatron-steps', 'intranode-fusco', 'intranode-deep_ep']
    """
    python, two = sys.executable, ("--num-processes", "2")
    steps = (python, str(ROOT / "tools" / "megatron_steps.py"), "--device", "cuda")
    parts = {"megatron-steps": Part(steps, ROOT, OURS, 90.0)}
    if deep_ep:  # 4096 tokens, hidden 7168, top-8 of 256 are its defaults
        parts["intranode-fusco"] = Part((python, "test_intranode.py", *two), deep_ep, OURS, 90.0)
        if peer:
            parts["intranode-deep_ep"] = Part((python, "test_intranode.py", *two), deep_ep, peer, 60.0)
    if hybrid_ep:  # without the option it looks for kernels by DeepEP's names
        hybrid = (python, "test_hybrid_ep.py", *two, "--nsys-profile")
        parts["hybrid-fusco"] = Part(hybrid, hybrid_ep, OURS, 90.0)
    return parts


def run_parts(parts: Mapping[str, Part], out: Path) -> dict[str, str]:
    """Run parts one by one, and return how each ended."""
    out.mkdir(parents=True, exist_ok=True)
    ends = {}
    for name, part in parts.items():
        start, log = time.monotonic(), out / f"{name}.txt"
        path = os.pathsep.join(filter(None, (str(part.deep_ep), str(ROOT / "src"), os.environ.get("PYTHONPATH"))))
        command = ["env", "-C", str(part.folder), f"PYTHONPATH={path}", *part.command]
        ends[name] = run_limited(command, log, part.limit_s)
        shown = [line for line in log.read_text(errors="replace").splitlines() if any(word in line for word in SHOWN)]
        took = time.monotonic() - start
        sys.stdout.write("\n".join((f"{name}: {ends[name]} after {took:.0f} s", *shown[-40:], "")))
        sys.stdout.flush()
    return ends


def main() -> int:
    """Run the parts for which there are folders."""
    parser = argparse.ArgumentParser(description=__doc__)
    for option in ("--deep-ep", "--hybrid-ep", "--peer"):
        parser.add_argument(option, type=lambda name: Path(name).resolve(strict=True))
    parser.add_argument("--out", type=Path, default=Path("out/bench-frameworks"))
    chosen = parser.parse_args()
    ends = run_parts(parts_of(chosen.deep_ep, chosen.hybrid_ep, chosen.peer), chosen.out)
    return int(any(end != "done" for end in ends.values()))


if __name__ == "__main__":
    sys.exit(main())
