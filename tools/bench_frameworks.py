"""Measure frameworks on two GPUs: Megatron's and DeepEP's own tests, prefills, training of Megatron's MoE layers.

``python tools/bench_frameworks.py --carried FOLDER``, or ``make bench-frameworks``. FOLDER has what fusco does not
contain; a part for which something is missing is left out:

- ``megatron``: a checkout of Megatron-LM, see ``megatron_tests.py``;
- ``deep_ep`` and ``hybrid_ep``: the folder ``tests`` of DeepEP at v1.2.1, and of its branch hybrid-ep, unchanged;
- ``wheels``: wheels for all parts, such as those of megatron-core and transformers 5.23;
- ``peer``: DeepEP's wheel, for parts that measure it beside fusco.

Each part is a process of its own with a limit of its own; PART.txt has its output, prefill.jsonl and
megatron-tests.jsonl the records, summary.md tables for the documentation. ``--resume`` runs what is missing: parts, and
cases of the prefill. With ``--device cpu`` the same parts run on two cores, with small sizes. Exit code 1 if a part
failed, was killed or was left out because the time was over.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

import fusco
from bench_gpu import folder, run_limited
from fusco.bench.harness.environment import commit
from fusco.core.files import written_beside

TOOLS = Path(__file__).parent
OURS = Path(fusco.__file__).parent / "integrations" / "path"
# Lines that a summary shows: bandwidths of DeepEP's tests, checks, results of Megatron's tests and steps. Others it
# counts: one for each check and for each size that a test tries.
SHOWN = ("Best", "default:", "PASS", "FAIL", "passed", "Error", "GB/s", "losses", "_ms:", "prefill ", "  rank ")
COUNTED = ("[testing]", "[tuning] SMs")
PREFILL = "bench prefill --batches 4,skewed,1 --routing random,trace --resume"
SMALL_INTRANODE = "--num-tokens 64 --hidden 256 --num-topk 4 --num-experts 16"
SMALL_HYBRID = {"HIDDEN_DIM": "256", "NUM_TOKENS_PER_RANK": "48", "NUM_LOCAL_EXPERTS": "4", "TOPK": "3"}


@dataclass(frozen=True, kw_only=True)
class Part:
    """A command, and the seconds after which it is killed."""

    command: tuple[str, ...]
    limit_s: float
    deep_ep: Path = OURS  # folder of the module of that name
    folder: Path = TOOLS.parent
    environment: Mapping[str, str] = field(default_factory=dict)


def parts_of(carried: Path, out: Path, site: Path, device: str) -> dict[str, Part]:
    """Return the parts that can run with what was carried, by name, the most important first.

    Args:
        carried: folder of what fusco does not contain.
        out: folder of results.
        site: folder in which ``install`` puts packages.
        device: ``"cpu"`` or ``"cuda"``.

    """
    python, is_cuda = (sys.executable,), device == "cuda"
    peer = site / "peer" if is_cuda and (carried / "peer").exists() else None
    parts = {}
    if (carried / "megatron").exists():
        test = (*python, str(TOOLS / "megatron_tests.py"), "--megatron", str(carried / "megatron"), "--device", device)
        records = str(out / "megatron-tests.jsonl")
        parts["megatron-tests"] = Part(command=(*test, "--json", records), limit_s=90.0)
        if peer:
            other = ("--deep-ep", str(peer), "--json", str(out / "megatron-tests-deep_ep.jsonl"))
            parts["megatron-tests-deep_ep"] = Part(command=(*test, *other), limit_s=60.0, deep_ep=peer)
    sizes = "--iterations 10" if is_cuda else "--iterations 3 --tokens 64"
    prefill = (
        "-m",
        "fusco",
        *PREFILL.split(),
        "--device",
        device,
        *sizes.split(),
        "--json",
        str(out / "prefill.jsonl"),
    )
    parts["prefill"] = Part(command=(*python, *prefill), limit_s=330.0, deep_ep=peer or OURS)
    runner = python if is_cuda else (*python, str(TOOLS / "without_cuda.py"))
    two = ("--num-processes", "2")
    if (tests := carried / "deep_ep").exists():  # 4096 tokens, hidden 7168, top-8 of 256 are its defaults
        small = [] if is_cuda else SMALL_INTRANODE.split()
        command = (*runner, str(tests / "test_intranode.py"), *two, *small)
        parts["intranode-fusco"] = Part(command=command, limit_s=90.0, folder=tests)
        if peer:
            parts["intranode-deep_ep"] = Part(command=command, limit_s=60.0, folder=tests, deep_ep=peer)
    if (tests := carried / "hybrid_ep").exists():  # without the option it looks for kernels by DeepEP's names
        command = (*runner, str(tests / "test_hybrid_ep.py"), *two, "--nsys-profile")
        sizes_of_test = {} if is_cuda else SMALL_HYBRID
        parts["hybrid-fusco"] = Part(command=command, limit_s=90.0, folder=tests, environment=sizes_of_test)
    log = ("--json", str(out / "megatron-steps.json"))
    steps = (*python, str(TOOLS / "megatron_steps.py"), "--device", device, *log)
    parts["megatron-steps"] = Part(command=steps, limit_s=90.0)
    return parts


def install(carried: Path, site: Path) -> None:
    """Install carried wheels into folders of ``site``, without a network."""
    for name in ("wheels", "peer"):
        wheels = sorted(map(str, (carried / name).glob("*.whl")))
        if wheels and not (site / name).exists():
            options = ("--quiet", "--no-index", "--no-deps", "--target", str(site / name))
            subprocess.run([sys.executable, "-m", "pip", "install", *options, *wheels], check=True)  # noqa: S603


def run_parts(
    parts: Mapping[str, Part], out: Path, limit_s: float, *, packages: Path | None = None, resumes: bool = False
) -> dict[str, str]:
    """Run parts one by one, and return how each ended.

    Args:
        parts: by name.
        out: directory of their files, which is made.
        limit_s: of all parts, in seconds; a part that cannot begin before it is left out.
        packages: folder that all parts import from.
        resumes: leaves out parts that were done with the same command and commit.

    """
    out.mkdir(parents=True, exist_ok=True)
    path, deadline = out / "ends.json", time.monotonic() + limit_s
    ends = json.loads(path.read_text()) if resumes and path.exists() else {}
    for name, part in parts.items():
        start, log = time.monotonic(), out / f"{name}.txt"
        origin = [commit(), *(each.replace(str(out), "OUT") for each in part.command)]
        if ends.get(name) != ["done", *origin]:
            log.unlink(missing_ok=True)
            left_s = min(part.limit_s, deadline - start)
            end = run_limited(command_of(part, packages), log, left_s) if left_s > 0 else "left out"
            ends[name] = [end, *origin]
            with written_beside(path) as beside:
                beside.write_text(json.dumps(ends))
        lines = log.read_text(errors="replace").splitlines() if log.exists() else []
        shown = [line for line in lines if any(word in line for word in SHOWN) and not line.startswith(COUNTED)]
        num_passed = sum(re.search(r"(?<!cases )\b(passed|PASS)\b", line) is not None for line in lines)
        result = f"{name}: {ends[name][0]}, {num_passed} passed, {time.monotonic() - start:.0f} s"
        sys.stdout.write("\n".join((result, *shown[-40:], "")))
        sys.stdout.flush()
    return {name: ends[name][0] for name in parts}


def command_of(part: Part, packages: Path | None) -> list[str]:
    """Return the command with its folder and the paths of its modules and libraries."""
    ours = (part.deep_ep, packages, Path(fusco.__file__).parents[1], TOOLS, os.environ.get("PYTHONPATH"))
    nvshmem = Path(torch.__file__).parents[1] / "nvidia" / "nvshmem" / "lib"  # DeepEP's library needs it
    paths = {"PYTHONPATH": ours, "LD_LIBRARY_PATH": (nvshmem, os.environ.get("LD_LIBRARY_PATH"))}
    variables = {name: os.pathsep.join(map(str, filter(None, parts))) for name, parts in paths.items()}
    variables |= part.environment
    return ["env", "-C", str(part.folder), *(f"{name}={value}" for name, value in variables.items()), *part.command]


def prefill_table(records: Iterable[Mapping[str, Any]]) -> str:
    """Return a Markdown table: times to the first token of each case, ms, and what fusco gains."""
    records = [record for record in records if record["kind"] == "prefill"]
    variants = list(dict.fromkeys(record["variant"] for record in records))
    ratios = [name for name in ("baseline", "torch", "transformers", "deep_ep") if name in variants]
    heads = ["routing", "batch", *variants, *(f"{name} / fusco" for name in ratios)]
    lines = [f"| {' | '.join(heads)} |", f"|{' --- |' * len(heads)}"]
    for (routing, batch), case in groupby(records, lambda record: (record["routing"], record["batch"])):
        found = {record["variant"]: record for record in case}
        cells = [_time_of(found.get(variant)) for variant in variants]
        ours = found.get("fusco", {}).get("ttft_ms")
        theirs = [found.get(name, {}).get("ttft_ms") for name in ratios]
        gains = [f"{ms / ours:.2f}" if ms and ours else "-" for ms in theirs]
        lines.append(f"| {' | '.join([routing, batch, *cells, *gains])} |")
    return "\n".join(lines) + "\n"


def _time_of(record: Mapping[str, Any] | None) -> str:
    if record is None:
        return "-"
    if not record["verified"]:
        return "NOT VERIFIED"
    is_steady = record["slowest_ms"] <= 1.3 * record["ttft_ms"]
    return f"{record['ttft_ms']:.1f}" + ("" if is_steady else f" (slowest {record['slowest_ms']:.1f})")


def summarize(out: Path, ends: Mapping[str, str]) -> str:
    """Return what ran and what did not, and the prefill's table."""
    lines = [f"- {name}: {end}" for name, end in ends.items()]
    tests = _records(out / "megatron-tests.jsonl")
    if tests:
        lines.append(f"- Megatron's tests: {sum(each['verified'] for each in tests)} of {len(tests)} cases passed")
    prefills = [each for each in _records(out / "prefill.jsonl") if each["kind"] == "prefill"]
    if prefills:
        job = prefills[0]["job"]
        layers, tokens = job["shape"]["num_layers"], job["tokens"]
        title = f"{layers} layers, {tokens} tokens a rank, {job['dtype']}, medians of {job['num_iterations']}, ms"
        lines += ["", f"{title}, commit {prefills[0]['commit']}:", "", prefill_table(prefills)]
    return "\n".join(lines) + "\n"


def _records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def main() -> int:
    """Run the parts for which there are files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--carried", type=folder, required=True)
    parser.add_argument("--out", type=Path, default=Path("out/bench-frameworks"))
    parser.add_argument("--site", type=Path, help="where to install the wheels; by default in the folder of --out")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--minutes", type=float, default=9.0, help="limit of all parts")
    parser.add_argument("--only", nargs="+", metavar="PART")
    parser.add_argument("--resume", action="store_true")
    chosen = parser.parse_args()
    start, out = time.monotonic(), chosen.out.resolve()
    site = (chosen.site or out).resolve()
    parts = parts_of(chosen.carried, out, site, chosen.device)
    if unknown := set(chosen.only or ()) - set(parts):
        parser.error(f"no part {', '.join(sorted(unknown))} here: there are {', '.join(parts)}")
    out.mkdir(parents=True, exist_ok=True)
    install(chosen.carried, site)
    if not chosen.resume:
        (out / "prefill.jsonl").unlink(missing_ok=True)
    wanted = {name: part for name, part in parts.items() if not chosen.only or name in chosen.only}
    left_s = chosen.minutes * 60 - (time.monotonic() - start)
    ends = run_parts(wanted, out, left_s, packages=site / "wheels", resumes=chosen.resume)
    summary = summarize(out, ends)
    (out / "summary.md").write_text(summary)
    sys.stdout.write(summary)
    return int(any(end != "done" for end in ends.values()))


if __name__ == "__main__":
    sys.exit(main())
