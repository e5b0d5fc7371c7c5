"""Results of a prefill benchmark: a record for each routing, batch and variant."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import numpy as np

from fusco.bench.environment import Measurement, hardware, versions
from fusco.bench.prefill.batches import describe
from fusco.bench.prefill.gate import Deviation
from fusco.bench.prefill.job import PrefillJob
from fusco.bench.prefill.variants import deep_ep_version


@dataclass(frozen=True, kw_only=True)
class Case:
    """A batch and a routing."""

    batch: str  # its name
    routing: str  # its name
    lengths: list[tuple[int, ...]]  # of every rank's prompts
    imbalance: float  # rows of the busiest rank over those of the mean rank, mean over layers


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One variant's measurements in a case, of all ranks."""

    ttft_ms: Sequence[float]  # of every prefill, the slowest rank's
    # dispatch and combine, summed over layers, and the prefill that they are part of; medians over prefills of means
    # over ranks
    section_ms: dict[str, float]
    deviations: Sequence[Deviation]  # of every rank


@dataclass(frozen=True, kw_only=True)
class PrefillRecord(Measurement):
    """One variant in one case."""

    kind: str = "prefill"
    variant: str  # its name
    routing: str  # its name
    batch: str  # a description
    lengths: list[tuple[int, ...]]  # of every rank's prompts
    imbalance: float  # see ``Case``
    ttft_ms: float  # median time from a barrier until the host has the first token of every prompt, the slowest rank's
    p99_ms: float  # its 99th percentile
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
    verified: bool  # whether the comparisons were within their limits
    errors: list[str]  # what was not
    num_iterations: int  # timed prefills
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
    num_tokens = sum(map(sum, case.lengths))
    typical_ms = median(measured.ttft_ms) if measured.ttft_ms else 0.0
    sections = measured.section_ms
    errors = [
        f"rank {rank}: {failure}"
        for rank, deviation in enumerate(measured.deviations)
        for failure in deviation.failures(job.dtype)
    ]
    return PrefillRecord(
        variant=variant,
        routing=case.routing,
        batch=describe(case.batch, case.lengths),
        lengths=case.lengths,
        imbalance=round(case.imbalance, 3),
        ttft_ms=round(typical_ms, 3),
        p99_ms=round(float(np.percentile(measured.ttft_ms, 99)), 3) if measured.ttft_ms else 0.0,
        tokens_per_s=round(num_tokens / typical_ms * 1e3) if typical_ms else 0,
        dispatch_ms=round(sections.get("dispatch", 0.0), 3),
        combine_ms=round(sections.get("combine", 0.0), 3),
        shuffle_share=round((sections["dispatch"] + sections["combine"]) / sections["prefill"], 4) if sections else 0.0,
        layer_error=max(each.layer for each in measured.deviations),
        logits_error=max(each.logits for each in measured.deviations),
        typical_logits_error=max(each.typical_logits for each in measured.deviations),
        same_next_tokens=round(sum(each.num_same_tokens for each in measured.deviations) / num_tokens, 5),
        verified=not errors,
        errors=errors,
        num_iterations=len(measured.ttft_ms),
        peak_memory_gib=round(peak_memory_bytes / 2**30, 2),
        job=asdict(job),
        versions=versions("transformers") | ({"deep_ep": deep_ep_version()} if variant == "deep_ep" else {}),
        hardware=hardware(job.device),
    )
