"""Results of a decode benchmark: a record for each number of tokens, of micro-batches, and variant."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from fusco.bench.decode.exchanges import FUSCO
from fusco.bench.decode.job import DecodeJob
from fusco.bench.harness.environment import VerifiedMeasurement, hardware, versions
from fusco.bench.harness.model_job import errors_beyond
from fusco.bench.harness.stopwatch import slowest_median
from fusco.bench.prefill.variants import deep_ep_version


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One variant's measurements in a case, of one rank."""

    layer_error: float  # the largest error of a token's output of its experts in any layer
    step_error: float  # the largest error of a token's last hidden states
    times_ms: Sequence[float] = ()  # of each timed step

    def failures(self, job: DecodeJob) -> list[str]:
        """Describe what is beyond its limit; empty if nothing is."""
        what_ends = "the hidden states of a step are"
        return errors_beyond(job.dtype, self.layer_error, self.step_error, what_ends, job.shape.num_layers)


@dataclass(frozen=True, kw_only=True)
class DecodeRecord(VerifiedMeasurement):
    """One variant in one case."""

    kind: str = "bench.decode"
    variant: str  # its name
    tokens: int  # of each rank in a step, one for each of its sequences
    micro_batches: int  # parts of a step, of which two overlap
    is_graph: bool  # whether a step is a CUDA graph
    tpot_ms: float  # time per output token: median of a step until the host has the next tokens, the slowest rank's
    p99_ms: float  # its 99th percentile
    tokens_per_s: int  # of all ranks, over the median
    # Errors relative to the norm of the reference, the largest of all ranks: see ``Measured``.
    layer_error: float
    step_error: float
    num_iterations: int  # timed steps
    job: dict[str, Any]  # its configuration


def summarize(
    job: DecodeJob, case: tuple[int, int], variant: str, of_ranks: Sequence[Measured], *, is_graph: bool
) -> DecodeRecord:
    """Return the record of one variant in a case; times are zero unless it is verified."""
    errors = sorted({line for rank in of_ranks for line in rank.failures(job)})
    num_iterations = len(of_ranks[0].times_ms)
    slowest = [max(times) for times in zip(*(rank.times_ms for rank in of_ranks), strict=True)]
    typical = slowest_median([rank.times_ms for rank in of_ranks], 4) if num_iterations else 0.0
    of_deep_ep = {"deep_ep": deep_ep_version()} if variant == "deep_ep" else {}
    return DecodeRecord(
        variant=variant,
        tokens=case[0],
        micro_batches=case[1],
        is_graph=is_graph,
        tpot_ms=typical,
        p99_ms=round(float(np.percentile(slowest, 99)), 4) if slowest else 0.0,
        tokens_per_s=round(case[0] * job.num_ranks / typical * 1e3) if typical else 0,
        layer_error=max(rank.layer_error for rank in of_ranks),
        step_error=max(rank.step_error for rank in of_ranks),
        verified=not errors,
        errors=errors,
        num_iterations=num_iterations,
        job=asdict(job),
        versions=versions() | of_deep_ep,
        hardware=hardware(job.device),
    )


def headline(records: Sequence[DecodeRecord]) -> str:
    """Return fusco's step beside the best other one, where it gains least; why there is none otherwise.

    Each number of tokens counts once, with the best number of micro-batches of either.
    """
    if wrong := [each for each in records if not each.verified]:
        return f"no comparison: {len(wrong)} of {len(records)} results are not verified"
    pairs = []
    for tokens in dict.fromkeys(each.tokens for each in records):
        of_case = sorted((each for each in records if each.tokens == tokens), key=lambda each: each.tpot_ms)
        ours = next((each for each in of_case if each.variant in FUSCO), None)
        other = next((each for each in of_case if each.variant not in FUSCO), None)
        if ours and other:
            pairs.append((other.tpot_ms / ours.tpot_ms, ours, other))
    if not pairs:
        return "no comparison: it needs one of fusco's variants and another"
    ratio, ours, other = min(pairs, key=lambda pair: pair[0])
    several = "at least " if len(pairs) > 1 else ""
    return (
        f"{ours.variant} {ours.tpot_ms:.4g} ms per token at {ours.tokens} tokens a rank, best other "
        f"{other.tpot_ms:.4g} ms ({other.variant}): {several}{ratio:.2f} times as fast, verified"
    )
