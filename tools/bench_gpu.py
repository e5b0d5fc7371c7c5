"""Measure what docs/performance says of two GPUs: each part in a process of its own, with a limit of its own.

``python tools/bench_gpu.py [--out DIRECTORY] [--limit-s SECONDS] [--only PART ...] [--resume]``, or
``make bench-gpu``. For every part PART.txt has its tables and PART.jsonl its records; summary.md has one line for each
record. Exit code 1 if a part failed, ran out of time, or was left out because all together had.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from parts import Outcome, Part, choose, finish, new_parser, read_records, run_parts

LIMIT_S = 480.0  # of all parts
UNIFORM = "bench shuffle --device cuda --traffic uniform"
LARGE, SMALL = f"{UNIFORM} --hidden 7168 --num-experts 256", f"{UNIFORM} --hidden 2048 --num-experts 128"
WITHIN = "--variants fusco,fusco-graph,baseline"
# Arguments of ``fusco``, and the seconds after which it is killed. The most important first: what is left out is at the
# end.
PARTS: dict[str, tuple[str, float]] = {
    **{f"h7168-t{n}": (f"{LARGE} --tokens {n} {WITHIN}", 60.0) for n in (128, 1024, 2048, 8192)},
    **{f"nodes-t{n}": (f"{LARGE} --tokens {n} --nodes 2", 60.0) for n in (128, 1024)},
    "nodes-t8192": (f"{LARGE} --tokens 8192 --nodes 2 --iterations 10", 90.0),
    "train": ("train --preset large --device cuda --dispatcher both --steps 30", 120.0),
    **{f"h2048-t{n}": (f"{SMALL} --tokens {n} {WITHIN}", 60.0) for n in (128, 1024, 8192)},
    **{
        f"sms32-t{n}": (f"{LARGE} --tokens {n} --variants fusco,fusco-graph --num-sms 32", 60.0)
        for n in (128, 1024, 8192)
    },
    "prefill": ("bench prefill --device cuda --layers 24 --routing trace --iterations 10", 150.0),
    # With balance the time should not grow with the skew, the busiest rank over the mean: at most the number of GPUs.
    "balance": (
        "bench prefill --device cuda --layers 4 --routing skew1,skew1.5,skew2,skew4 --batches 1 --variants fusco "
        "--balance --spare-places 4 --iterations 10",
        150.0,
    ),
    **{
        f"decode-{dtype}": (f"bench decode --device cuda --dtype {dtype} --tokens 1,8,32,64,128", 150.0)
        for dtype in ("bfloat16", "fp8")
    },
}


def parts_of(out: Path) -> dict[str, Part]:
    """Return all parts by name, with their records in a folder."""
    parts = {}
    for name, (arguments, limit_s) in PARTS.items():
        records = out / f"{name}.jsonl"
        command = (sys.executable, "-m", "fusco", *arguments.split(), "--json", str(records))
        parts[name] = Part(command=command, limit_s=limit_s, records=records)
    return parts


def summarize(out: Path, outcomes: Mapping[str, Outcome]) -> str:
    """Return a Markdown table with a line for each record of each part, times in milliseconds."""
    lines = [
        "| part | variant | dispatch | combine | both | 20 in a row | idle to idle | verified |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, outcome in outcomes.items():
        records = read_records(out / f"{name}.jsonl")
        lines += [_line(name, record) for record in records if record.get("kind") not in ("step", "skipped")]
        if outcome.how != "done":
            lines.append(f"| {name} | {outcome.how} after {outcome.seconds:.0f} s | | | | | | |")
    return "\n".join(lines) + "\n"


def _line(name: str, record: Mapping[str, Any]) -> str:
    if record.get("kind") == "run":  # of training: forward and backward of all layers, and the step
        dispatch, combine = (
            f"{record[f'{verb}_ms']:.2f} + {record[f'{verb}_backward_ms']:.2f}" for verb in ("dispatch", "combine")
        )
        return f"| {name} | {record['dispatcher']} | {dispatch} | {combine} | step {record['step_ms']:.1f} | | | |"
    if record.get("kind") == "prefill":  # all layers, and the time to the first token
        cells = [record["variant"], *(f"{record[f'{verb}_ms']:.2f}" for verb in ("dispatch", "combine"))]
        verified = "yes" if record["verified"] else "NO"
        case = f"{record['routing']}, {record['batch']}: {record['ttft_ms']:.1f}"
        return f"| {name} | {' | '.join(cells)} | {case} | | | {verified} |"
    if record.get("kind") == "bench.decode":  # a step
        case = f"{record['tokens']} tokens in {record['micro_batches']}: {record['tpot_ms']:.3f}"
        return f"| {name} | {record['variant']} | | | {case} | | | {'yes' if record['verified'] else 'NO'} |"
    names = ("dispatch_ms", "combine_ms", "total_ms", "loop_ms", "idle_ms")
    cells = ["-" if record.get(field) is None else f"{record[field]:.3f}" for field in names]
    return f"| {name} | {record['variant']} | {' | '.join(cells)} | {'yes' if record['verified'] else 'NO'} |"


def main() -> int:
    """Run the parts that were asked for and write their summary."""
    parser = new_parser(__doc__, "out/bench-gpu")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S)
    chosen = parser.parse_args()
    parts = choose(parts_of(chosen.out), chosen, parser)
    outcomes = run_parts(parts, chosen.out, chosen.limit_s, resumes=chosen.resume)
    return finish(chosen.out, summarize(chosen.out, outcomes), outcomes)


if __name__ == "__main__":
    sys.exit(main())
