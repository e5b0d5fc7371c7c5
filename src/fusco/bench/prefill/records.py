"""Results of a prefill benchmark: a record for each routing, batch and variant."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from fusco.bench.harness.environment import VerifiedMeasurement, commit, hardware, record_of, versions
from fusco.bench.inputs.prompts import describe_prompts, prompt_lengths
from fusco.bench.prefill.iterations import Iteration
from fusco.bench.prefill.job import PrefillJob
from fusco.bench.prefill.variants import Deviation, deep_ep_version


@dataclass(frozen=True, kw_only=True)
class Case:
    """A batch and a routing."""

    batch: str  # a description
    routing: str  # its name
    lengths: list[tuple[int, ...]]  # of every rank's prompts
    imbalance: float  # rows of the busiest rank over those of the mean rank, mean over layers


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One variant's measurements in a case, of all ranks."""

    iterations: Sequence[Sequence[Iteration]]  # of every prefill and rank
    # dispatch and combine, summed over layers, and the prefill that they are part of; medians over prefills of means
    # over ranks
    section_ms: dict[str, float]
    deviations: Sequence[Deviation]  # of every rank


@dataclass(frozen=True, kw_only=True)
class PrefillRecord(Case, VerifiedMeasurement):
    """One variant in one case."""

    kind: str = "prefill"
    variant: str  # its name
    ttft_ms: float  # median time from a barrier until the host has the first token of every prompt, the slowest rank's
    p99_ms: float  # its 99th percentile
    slowest_ms: float  # its maximum
    busiest_cpu_ms: float  # processor time of the rank with the most, median: of it alone, however few the cores
    tokens_per_s: int  # tokens of all prompts over the median
    # dispatch_ms, combine_ms: of all layers, waiting included, means over ranks, from separate prefills
    dispatch_ms: float
    combine_ms: float
    shuffle_share: float  # these two over those prefills' time
    # layer_error, logits_error, typical_logits_error: see ``Deviation``, the largest of all ranks
    layer_error: float
    logits_error: float
    typical_logits_error: float
    same_next_tokens: float  # share of tokens after which the most probable one is that of the reference
    num_iterations: int  # timed prefills
    iterations: Sequence[Sequence[Iteration]]  # of every one and rank
    peak_memory_gib: float  # allocated by PyTorch on rank 0's GPU, weights included; 0 on the CPU
    job: dict[str, Any]  # its configuration


@dataclass(frozen=True, kw_only=True)
class SkippedRecord:
    """A variant that cannot run here, and why."""

    kind: str = "skipped"
    variant: str
    reason: str


def summarize(job: PrefillJob, case: Case, variant: str, measured: Measured, peak_memory_bytes: int) -> PrefillRecord:
    """Return the record of a variant in a case."""
    num_tokens, sections = sum(map(sum, case.lengths)), measured.section_ms
    times = [max(rank.ms for rank in ranks) for ranks in measured.iterations]
    busiest = [max(rank.cpu_ms for rank in ranks) for ranks in measured.iterations]
    typical_ms = median(times) if times else 0.0
    errors = [
        f"rank {rank}: {failure}"
        for rank, deviation in enumerate(measured.deviations)
        for failure in deviation.failures(job.dtype)
    ]

    def largest(name: str) -> float:
        return max(float(getattr(each, name)) for each in measured.deviations)

    return record_of(
        PrefillRecord,
        case,
        variant=variant,
        ttft_ms=round(typical_ms, 3),
        p99_ms=round(float(np.percentile(times, 99)), 3) if times else 0.0,
        slowest_ms=max(times, default=0.0),
        busiest_cpu_ms=median(busiest) if busiest else 0.0,
        tokens_per_s=round(num_tokens / typical_ms * 1e3) if typical_ms else 0,
        **{f"{verb}_ms": round(sections.get(verb, 0.0), 3) for verb in ("dispatch", "combine")},
        shuffle_share=round((sections["dispatch"] + sections["combine"]) / sections["prefill"], 4) if sections else 0.0,
        layer_error=largest("layer"),
        **{f"{name}_error": largest(name) for name in ("logits", "typical_logits")},
        same_next_tokens=round(sum(each.num_same_tokens for each in measured.deviations) / num_tokens, 5),
        verified=not errors,
        errors=errors,
        num_iterations=len(times),
        iterations=measured.iterations,
        peak_memory_gib=round(peak_memory_bytes / 2**30, 2),
        job=asdict(job),
        versions=versions("transformers") | ({"deep_ep": deep_ep_version()} if variant == "deep_ep" else {}),
        hardware=hardware(job.device),
    )


class Resumed(NamedTuple):
    """A job that goes on where a file of records ends."""

    job: PrefillJob  # without the cases that the file has
    kept: list[PrefillRecord]  # of those cases
    lines: list[str]  # of the file, without those that the job will write again, and without an incomplete one


def resume(job: PrefillJob, path: Path) -> Resumed:
    """Return the job without the cases that a file of records has.

    A case counts if all its variants are there, of the same sizes and the same commit. All other records stay. Raises
    ``ValueError`` if the file has anything but records, except for an incomplete last line.
    """
    wanted = _comparable(json.loads(json.dumps(asdict(job))))
    kept: list[PrefillRecord] = []
    done: list[tuple[str, str]] = []
    lines = [(each, _record_of(each)) for each in (_loaded(path) if path.exists() else [])]
    ours = [each for _, each in lines if each and _comparable(each.job) == wanted and each.commit == commit()]
    again: list[PrefillRecord] = []
    for routing, batch in product(job.routings, job.batches):
        described = describe_prompts(batch, prompt_lengths(batch, job.tokens, job.num_ranks))
        of_case = [each for each in ours if (each.routing, each.batch) == (routing, described)]
        case = {each.variant: each for each in of_case}
        if set(job.variants) <= set(case):
            kept += [case[variant] for variant in job.variants]
            done.append((routing, batch))
        else:
            again += [each for each in of_case if each.variant in job.variants]
    stay = [json.dumps(values) for values, record in lines if all(record is not each for each in again)]
    return Resumed(replace(job, done=tuple(done)), kept, stay)


def _loaded(path: Path) -> list[dict[str, Any]]:
    """Return the values of each line, without a last one that a killed run did not complete."""
    values: list[dict[str, Any]] = []
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    for number, line in enumerate(lines, 1):
        try:
            loaded = json.loads(line)
        except ValueError:
            if number == len(lines) and line.startswith("{"):
                break
            loaded = None
        if not isinstance(loaded, dict):
            what = f"line {number} is not a record, but {line[:40]!r}"
            raise ValueError(f"{path} cannot be resumed: {what}")  # noqa: TRY004  it is the file's
        values.append(loaded)
    return values


def _record_of(values: dict[str, Any]) -> PrefillRecord | None:
    """Return the record of a line's values; ``None`` for other kinds."""
    names = {field.name for field in fields(PrefillRecord)}
    if values.get("kind") != "prefill" or set(values) != names:  # of another version
        return None
    try:
        iterations = [[Iteration(**rank) for rank in ranks] for ranks in values["iterations"]]
    except TypeError:
        return None  # also of another version
    # JSON lacks infinity, which is null there.
    numbers: dict[str, Any] = {name: math.inf if value is None else value for name, value in values.items()}
    return PrefillRecord(**{**numbers, "iterations": iterations})


def _comparable(job: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in job.items() if name not in ("batches", "routings", "variants", "done")}
