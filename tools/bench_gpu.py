"""Measure what docs/performance says of two GPUs: each part in a process of its own, with a limit of its own.

``python tools/bench_gpu.py [--only PART ...] [--resume] [--carried FOLDER]``, or ``make bench-gpu``. For every part
PART.txt has its tables and PART.jsonl its records; summary.md has one line for each record. records.jsonl has all
records behind a line on their origin, as files of docs/data do, and logs.txt all tables. FOLDER may have

- ``peer``: DeepEP's wheel, which shuffles, prefills and decode steps then measure in the same processes, and that of
  the NCCL that DeepEP 2 needs, which all parts then use;
- ``wheels``: wheels that fusco needs and the environment lacks;
- ``collectivex``: the folder experimental/CollectiveX of InferenceX, see ``collectivex.py``.

``--device cpu`` runs the same parts on two cores, with small sizes. Exit code 1 if a part failed, ran out of time, or
was left out because all together had.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from datetime import datetime, timezone
from itertools import product
from pathlib import Path
from typing import Any

import torch

from fusco.bench.harness.environment import commit, hardware
from parts import ROOT, Outcome, Part, choose, finish, install, new_parser, read_records, run_parts, search_paths

LIMIT_S = 1200.0  # of all parts
SHUFFLE = "-m fusco bench shuffle --device cuda"
LARGE, SMALL = f"{SHUFFLE} --hidden 7168 --num-experts 256", f"{SHUFFLE} --hidden 2048 --num-experts 128"
UNEVEN = "--traffic zipf,hot-experts,hot-spread,idle-experts,round-robin,one-rank"
# Arguments of Python, and the seconds after which it is killed. The most important first: what is left out is at the
# end. Without --variants a shuffle has DeepEP, where it is installed, and FP8.
PARTS: dict[str, tuple[str, float]] = {
    **{f"h7168-t{n}": (f"{LARGE} --traffic uniform --tokens {n}", 90.0) for n in (128, 1024, 2048, 8192, 16384)},
    **{f"h2048-t{n}": (f"{SMALL} --traffic uniform --tokens {n}", 90.0) for n in (128, 1024, 8192, 16384)},
    "skew-t8192": (f"{LARGE} {UNEVEN} --tokens 8192 --variants fusco,fusco-graph,baseline", 150.0),
    **{f"nodes-t{n}": (f"{LARGE} --traffic uniform --tokens {n} --nodes 2", 60.0) for n in (128, 1024)},
    "nodes-t8192": (f"{LARGE} --traffic uniform --tokens 8192 --nodes 2 --iterations 10", 90.0),
    **{
        f"decode-{dtype}": (
            f"-m fusco bench decode --device cuda --layers 12 --dtype {dtype} --tokens 1,8,64,512 --iterations 20",
            200.0,
        )
        for dtype in ("bfloat16", "fp8")
    },
    # With balance the time should not grow with the skew, the busiest rank over the mean: at most the number of GPUs.
    "balance": (
        "-m fusco bench prefill --device cuda --layers 24 --routing skew1,skew1.5,skew2,skew4 --batches 1 "
        "--variants fusco --balance --spare-places 4 --iterations 10",
        240.0,
    ),
    "copies": (f"{ROOT}/tools/expert_copies.py --device cuda", 60.0),
    "survivors": ("-m attack --only survivors --device cuda --seconds 150", 240.0),
    "train": ("-m fusco train --preset large --device cuda --dispatcher both --steps 30", 120.0),
    **{
        f"sms32-t{n}": (f"{LARGE} --traffic uniform --tokens {n} --variants fusco,fusco-graph --num-sms 32", 60.0)
        for n in (128, 1024, 8192)
    },
    "prefill": ("-m fusco bench prefill --device cuda --layers 24 --routing trace --iterations 10", 150.0),
}
REFEREE = f"-m torch.distributed.run --nproc-per-node 2 {ROOT}/tools/collectivex.py --device cuda"
# On CPUs: what options become, and which are left out.
SMALL_VALUES = {
    "--device": "cpu",
    "--tokens": "16",
    "--hidden": "256",
    "--num-experts": "64",  # a quarter of which is enough for top-8
    "--experts": "64",
    "--layers": "2",
    "--iterations": "2",
    "--preset": "small",
    "--steps": "2",
    "--seconds": "1",
    "--trials": "1",
    "--num-sms": None,
    "--variants": None,
}


def on_cpu(arguments: str) -> str:
    """Return a part's arguments for CPUs, with small sizes.

    >>> on_cpu("-m fusco bench shuffle --device cuda --tokens 8192 --num-sms 32 --nodes 2")
    '-m fusco bench shuffle --device cpu --tokens 16 --nodes 2'
    """
    words = arguments.split()
    small = []
    for before, word in zip(["", *words], words, strict=False):
        if before in SMALL_VALUES:
            small += [before, SMALL_VALUES[before]] if SMALL_VALUES[before] else []
        elif word not in SMALL_VALUES:
            small.append(word)
    return " ".join(map(str, small))


def parts_of(out: Path, site: Path, device: str, carried: Path | None = None) -> dict[str, Part]:
    """Return all parts by name, with their records in a folder and what ``install`` has put into ``site``."""
    arguments = dict(PARTS)
    if carried and (referee := carried / "collectivex").exists():
        cases = ("normal", "decode"), ("low-latency", "decode"), ("normal", "prefill")
        for (mode, phase), precision in product(cases, ("bf16", "fp8")):
            options = f"--referee {referee} --mode {mode} --phase {phase} --precision {precision} --trials 16"
            sizes = "" if device == "cuda" else " --tokens 16 --hidden 256 --experts 64"
            arguments[f"referee-{mode}-{phase}-{precision}"] = f"{REFEREE} {options}{sizes}", 90.0
    tests = [ROOT / "tests", ROOT / "tests" / "multirank", ROOT / "tests" / "unit" / "rails"]
    shared = {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"}
    parts = {}
    for name, (given, limit_s) in arguments.items():
        records = out / f"{name}.jsonl"
        command = (sys.executable, *(given if device == "cuda" else on_cpu(given)).split(), "--json", str(records))
        is_attack = name == "survivors"
        environment = search_paths(site / "peer", *(tests if is_attack else ()), site=site)
        environment |= shared if is_attack else {}
        parts[name] = Part(command=command, limit_s=limit_s, records=records, environment=environment)
    return parts


def summarize(out: Path, outcomes: Mapping[str, Outcome]) -> str:
    """Return a Markdown table with a line for each record of each part, times in milliseconds."""
    lines = [
        "| part | variant | dispatch | combine | both | 20 in a row | idle to idle | verified |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, outcome in outcomes.items():
        for record in read_records(out / f"{name}.jsonl"):
            lines += [f"| {name} | {' | '.join(cells)} |" for cells in _cells_of(record)]
        if outcome.how != "done":
            lines.append(f"| {name} | {outcome.how} after {outcome.seconds:.0f} s | | | | | | |")
    return "\n".join(lines) + "\n"


Record = Mapping[str, Any]


def _cells_of(record: Record) -> list[list[str]]:
    """Return the cells of each line on a record."""
    kind = record.get("kind", record.get("record_type", ""))
    return {**CELLS, "step": _none, "skipped": _none}.get(kind, _shuffled)(record)


def _none(_: Record) -> list[list[str]]:
    return []


def _shuffled(record: Record) -> list[list[str]]:
    names = ("dispatch_ms", "combine_ms", "total_ms", "loop_ms", "idle_ms")
    cells = ["-" if record.get(field) is None else f"{record[field]:.3f}" for field in names]
    variant = record["variant"] + ("" if record.get("traffic", "uniform") == "uniform" else f", {record['traffic']}")
    return [[variant, *cells, _verdict(record["verified"])]]


def _trained(record: Record) -> list[list[str]]:
    """Forward and backward of all layers, and the step."""
    dispatch, combine = (
        f"{record[f'{verb}_ms']:.2f} + {record[f'{verb}_backward_ms']:.2f}" for verb in ("dispatch", "combine")
    )
    return [[record["dispatcher"], dispatch, combine, f"step {record['step_ms']:.1f}", "", "", ""]]


def _prefilled(record: Record) -> list[list[str]]:
    """All layers, and the time to the first token."""
    times = [f"{record[f'{verb}_ms']:.2f}" for verb in ("dispatch", "combine")]
    case = f"{record['routing']}, {record['batch']}: {record['ttft_ms']:.1f}"
    return [[record["variant"], *times, case, "", "", _verdict(record["verified"])]]


def _decoded(record: Record) -> list[list[str]]:
    """A step."""
    case = f"{record['tokens']} tokens in {record['micro_batches']}: {record['tpot_ms']:.3f}"
    return [[record["variant"], "", "", case, "", "", _verdict(record["verified"])]]


def _copied(record: Record) -> list[list[str]]:
    case = f"{record['what']}: {record['ms']:.3f}" + (f", {record['gbs']} GB/s" if record["gbs"] else "")
    return [[record["variant"], "", "", case, "", "", _verdict(record["verified"])]]


def _struck(record: Record) -> list[list[str]]:
    case = f"{record['ranks']} ranks, {record['strikes']}: right after {1e3 * record['right_s']:.0f}"
    return [["fusco", "", "", case, "", "", "yes"]]


def _judged(record: Record) -> list[list[str]]:
    """Medians: of a drained pair, and of pairs that follow each other."""
    lines, backend = [], record["implementation"]["name"]
    for row in record["measurement"]["rows"]:
        names = ("dispatch", "combine", "roundtrip", "pair_period")
        times = [f"{row['components'][name]['percentiles_us']['p50'] / 1e3:.3f}" for name in names]
        verdict = _verdict(row["correctness"]["passed"])
        lines.append([f"{backend}, {row['tokens_per_rank']} tokens", *times, "", verdict])
    return lines


def _verdict(is_right: object) -> str:
    return "yes" if is_right else "NO"


CELLS = {
    "run": _trained,
    "prefill": _prefilled,
    "bench.decode": _decoded,
    "copies": _copied,
    "strike": _struck,
    "case-attempt": _judged,
}


def gather(out: Path, outcomes: Mapping[str, Outcome], device: str) -> None:
    """Write all records into one file, behind a line on their origin, and all tables into another."""
    found = hardware(device)
    gpus = f"{torch.cuda.device_count()} {found['gpu']}, " if device == "cuda" else ""
    origin = {
        "source": "make bench-gpu",
        "date": datetime.now(timezone.utc).date().isoformat(),
        "commit": commit(),
        "hardware": f"{gpus}{found['num_cores']} cores of {found['cpu']}, torch {torch.__version__}",
    }
    lines = [origin, *({"part": name, **each} for name in outcomes for each in read_records(out / f"{name}.jsonl"))]
    (out / "records.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    logs = ((name, out / f"{name}.txt") for name in outcomes)
    texts = [f"== {name}\n{log.read_text(errors='replace')}\n" for name, log in logs if log.exists()]
    (out / "logs.txt").write_text("".join(texts))


def main() -> int:
    """Run the parts that were asked for and write their summary."""
    parser = new_parser(__doc__, "out/bench-gpu")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="of all parts")
    chosen = parser.parse_args()
    out = chosen.out.resolve()
    site = (chosen.site or out).resolve()
    parts = choose(parts_of(out, site, chosen.device, chosen.carried), chosen, parser)
    out.mkdir(parents=True, exist_ok=True)
    if chosen.carried:
        install(chosen.carried, site)
    outcomes = run_parts(parts, out, chosen.limit_s, resumes=chosen.resume)
    gather(out, outcomes, chosen.device)
    return finish(out, summarize(out, outcomes), outcomes)


if __name__ == "__main__":
    sys.exit(main())
