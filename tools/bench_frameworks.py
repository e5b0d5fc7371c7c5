"""Measure frameworks on two GPUs: Megatron's and DeepEP's own tests, prefills, training of Megatron's MoE layers.

``python tools/bench_frameworks.py --carried FOLDER``, or ``make bench-frameworks``. FOLDER has what fusco does not
contain; a part for which something is missing is left out:

- ``megatron``: a checkout of Megatron-LM, see ``megatron_tests.py``;
- ``deep_ep`` and ``hybrid_ep``: the folder ``tests`` of DeepEP at v1.2.1, and of its branch hybrid-ep, unchanged;
- ``deep_ep_main``: the folders ``tests`` and ``deep_ep/utils`` of DeepEP's main at dd758ca, unchanged;
- ``wheels``: wheels for all parts, such as those of megatron-core and transformers 5.23;
- ``peer``: DeepEP's wheel, for parts that measure it beside fusco.

Each part is a process of its own with a limit of its own; PART.txt has its output, prefill.jsonl and
megatron-tests.jsonl the records, summary.md tables for the documentation. ``--resume`` runs what is missing: parts, and
cases of the prefill. With ``--device cpu`` the same parts run on two cores, with small sizes. Exit code 1 if a part
failed, was killed or was left out because the time was over.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import fusco
from parts import Outcome, Part, choose, finish, install, new_parser, read_records, run_parts, search_paths

TOOLS = Path(__file__).parent
OURS = Path(fusco.__file__).parent / "integrations" / "path"
# Lines that a summary shows: bandwidths of DeepEP's tests, checks, results of Megatron's tests and steps. Others it
# counts: one for each check and for each size that a test tries.
SHOWN = ("Best", "default:", "PASS", "FAIL", "passed", "Error", "GB/s", "losses", "_ms:", "prefill ", "  rank ")
COUNTED = ("[testing]", "[tuning] SMs")
PREFILL = "bench prefill --batches 4,skewed,1 --routing random,trace --resume"
TWO = ("--num-processes", "2")
SMALL_INTRANODE = "--num-tokens 64 --hidden 256 --num-topk 4 --num-experts 16"
SMALL_LOW_LATENCY = "--num-tokens 24 --hidden 1024 --num-topk 4 --num-experts 16"
SMALL_ELASTIC = "--num-tokens 24 --hidden 256 --num-topk 4 --num-experts 16"
SMALL_HYBRID = {"HIDDEN_DIM": "256", "NUM_TOKENS_PER_RANK": "48", "NUM_LOCAL_EXPERTS": "4", "TOPK": "3"}


def part(
    command: Sequence[str],
    limit_s: float,
    site: Path,
    *,
    deep_ep: Path = OURS,
    cwd: Path = TOOLS.parent,
    environment: Mapping[str, str] | None = None,
) -> Part:
    """Return a part that finds its modules and libraries: the ``deep_ep`` of a folder, and the wheels of ``site``."""
    variables = {**search_paths(deep_ep, site=site), **(environment or {})}
    return Part(command=tuple(command), limit_s=limit_s, folder=cwd, environment=variables)


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
        parts["megatron-tests"] = part((*test, "--json", records), 90.0, site)
        if peer:
            other = ("--deep-ep", str(peer), "--json", str(out / "megatron-tests-deep_ep.jsonl"))
            parts["megatron-tests-deep_ep"] = part((*test, *other), 60.0, site, deep_ep=peer)
    sizes = "--iterations 10" if is_cuda else "--iterations 3 --tokens 64"
    prefill = f"-m fusco {PREFILL} --device {device} {sizes} --json"
    parts["prefill"] = part((*python, *prefill.split(), str(out / "prefill.jsonl")), 330.0, site, deep_ep=peer or OURS)
    runner = python if is_cuda else (*python, str(TOOLS / "deep_ep_tests.py"), "--device", "cpu")
    if (tests := carried / "deep_ep").exists():  # 4096 tokens, hidden 7168, top-8 of 256 are its defaults
        small = [] if is_cuda else SMALL_INTRANODE.split()
        command = (*runner, str(tests / "test_intranode.py"), *TWO, *small)
        parts["intranode-fusco"] = part(command, 90.0, site, cwd=tests)
        if peer:
            parts["intranode-deep_ep"] = part(command, 60.0, site, cwd=tests, deep_ep=peer)
        if (low_latency := tests / "test_low_latency.py").exists():
            small = [] if is_cuda else SMALL_LOW_LATENCY.split()
            command = (*python, str(TOOLS / "deep_ep_tests.py"), "--device", device, str(low_latency), *TWO, *small)
            parts["low-latency-fusco"] = part(command, 90.0, site, cwd=tests)
    if (elastic := carried / "deep_ep_main" / "tests" / "elastic" / "test_ep.py").exists():
        small = [] if is_cuda else SMALL_ELASTIC.split()
        command = (*python, str(TOOLS / "deep_ep_tests.py"), "--device", device, str(elastic), *TWO, *small)
        once = ("--allow-multiple-reduction", "0", "--skip-perf-test")  # sums are rounded once
        parts["elastic-fusco"] = part((*command, *once), 240.0, site, environment={"FUSCO_ELASTIC_BUFFER": "1"})
    if (tests := carried / "hybrid_ep").exists():  # without the option it looks for kernels by DeepEP's names
        command = (*runner, str(tests / "test_hybrid_ep.py"), *TWO, "--nsys-profile")
        parts["hybrid-fusco"] = part(command, 90.0, site, cwd=tests, environment={} if is_cuda else SMALL_HYBRID)
    steps = (*python, str(TOOLS / "megatron_steps.py"), "--device", device, "--json", str(out / "megatron-steps.json"))
    parts["megatron-steps"] = part(steps, 90.0, site)
    return parts


def show(log: str) -> str:
    """Return the last lines of a log that a summary shows, and how many say that something passed."""
    lines = log.splitlines()
    shown = [line for line in lines if any(word in line for word in SHOWN) and not line.startswith(COUNTED)]
    num_passed = sum(re.search(r"(?<!cases )\b(passed|PASS)\b", line) is not None for line in lines)
    return "\n".join((f"{num_passed} passed", *shown[-40:]))


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


def summarize(out: Path, outcomes: Mapping[str, Outcome]) -> str:
    """Return what ran and what did not, and the prefill's table."""
    lines = [f"- {name}: {outcome.how}" for name, outcome in outcomes.items()]
    tests = read_records(out / "megatron-tests.jsonl")
    if tests:
        lines.append(f"- Megatron's tests: {sum(each['verified'] for each in tests)} of {len(tests)} cases passed")
    prefills = [each for each in read_records(out / "prefill.jsonl") if each["kind"] == "prefill"]
    if prefills:
        job = prefills[0]["job"]
        layers, tokens = job["shape"]["num_layers"], job["tokens"]
        title = f"{layers} layers, {tokens} tokens a rank, {job['dtype']}, medians of {job['num_iterations']}, ms"
        lines += ["", f"{title}, commit {prefills[0]['commit']}:", "", prefill_table(prefills)]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run the parts for which there are files."""
    parser = new_parser(__doc__, "out/bench-frameworks")
    parser.add_argument("--minutes", type=float, default=9.0, help="limit of all parts")
    chosen = parser.parse_args()
    if not chosen.carried:
        parser.error("--carried FOLDER is needed")
    start, out = time.monotonic(), chosen.out.resolve()
    site = (chosen.site or out).resolve()
    parts = choose(parts_of(chosen.carried, out, site, chosen.device), chosen, parser)
    out.mkdir(parents=True, exist_ok=True)
    install(chosen.carried, site)
    if not chosen.resume:
        (out / "prefill.jsonl").unlink(missing_ok=True)
    left_s = chosen.minutes * 60 - (time.monotonic() - start)
    outcomes = run_parts(parts, out, left_s, resumes=chosen.resume, show=show)
    return finish(out, summarize(out, outcomes), outcomes)


if __name__ == "__main__":
    sys.exit(main())
