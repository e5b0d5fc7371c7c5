"""Results of training: a record of every step, and one of every run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt

from fusco.bench.harness.environment import Measurement, hardware, versions
from fusco.train.job import TrainingJob
from fusco.train.observer import SECTIONS

_NUM_AVERAGED = 10  # the last loss is the mean of this many steps


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Times of a step of all ranks."""

    step_ms: float  # the slowest rank's, from the batch to the updated parameters, after a barrier
    tokens_per_s: int  # of all ranks
    # dispatch_ms, combine_ms: forward, means over ranks, recomputation by activation checkpointing included
    dispatch_ms: float
    combine_ms: float
    # dispatch_backward_ms, combine_backward_ms: likewise, backward
    dispatch_backward_ms: float
    combine_backward_ms: float
    shuffle_share: float  # these four over the step, mean over ranks


@dataclass(frozen=True, kw_only=True)
class StepRecord(StepTimes):
    """One step of all ranks."""

    kind: str = "step"
    dispatcher: str  # its name
    step: int  # counted from 0
    loss: float  # mean over the tokens of all ranks, in nats, before the step
    gradient_norm: float  # before clipping
    expert_imbalance: float  # rows of the busiest expert over those of the mean expert, mean over layers

    def describe(self) -> str:
        """Describe the step in one line."""
        return (
            f"{self.dispatcher}, step {self.step + 1}: loss {self.loss:.3f}, {self.tokens_per_s:,} tokens/s, dispatch "
            f"and combine {self.shuffle_share:.0%}, busiest expert {self.expert_imbalance:.2f} x mean"
        )


@dataclass(frozen=True, kw_only=True)
class RunRecord(StepTimes, Measurement):
    """A run with one dispatcher; times are medians over steps without the first ones."""

    kind: str = "run"
    dispatcher: str
    job: dict[str, Any]  # its configuration
    num_parameters: int  # of the whole model
    first_loss: float  # of the first step
    last_loss: float  # mean of the last ten steps
    max_loss_difference: float  # the largest difference between the losses of a step of this run and of the first run
    num_warm_ups: int  # steps that medians exclude
    first_expert_imbalance: float
    last_expert_imbalance: float
    peak_memory_gib: float  # peak memory allocated by PyTorch on rank 0's GPU; 0 on the CPU
    total_s: float  # of all steps


@dataclass(frozen=True)
class Run:
    """Result of a run with one dispatcher."""

    steps: list[StepRecord]  # all of them
    num_parameters: int  # of the whole model
    peak_memory_bytes: int  # on rank 0's GPU
    # of the last step, (tokens of all ranks by rank, num_layers, num_topk), if recorded
    routing: npt.NDArray[np.integer[Any]] | None


def summarize(job: TrainingJob, runs: Sequence[Run]) -> list[RunRecord]:
    """Return one record for each run."""
    return [_summarize(job, run, runs[0].steps) for run in runs]


def num_warm_ups(num_steps: int) -> int:
    """Return the number of first steps, with allocation and compilation, that medians exclude: a tenth, at most ten."""
    return min(10, num_steps // 10)


def _summarize(job: TrainingJob, run: Run, others: list[StepRecord]) -> RunRecord:
    steps, warm_ups = run.steps, num_warm_ups(len(run.steps))

    def typical(name: str) -> float:
        return round(float(median(getattr(step, name) for step in steps[warm_ups:])), 4)

    medians: dict[str, Any] = {name: typical(name) for name in (*(f"{each}_ms" for each in SECTIONS), "shuffle_share")}
    last = [step.loss for step in steps[-_NUM_AVERAGED:]]
    step_ms = typical("step_ms")
    return RunRecord(
        dispatcher=steps[0].dispatcher,
        job={**asdict(job), "text": str(job.text or "Python sources")},
        num_parameters=run.num_parameters,
        first_loss=steps[0].loss,
        last_loss=round(sum(last) / len(last), 4),
        max_loss_difference=max(abs(a.loss - b.loss) for a, b in zip(steps, others, strict=True)),
        num_warm_ups=warm_ups,
        step_ms=step_ms,
        tokens_per_s=round(job.num_ranks * job.tokens / step_ms * 1e3),
        **medians,
        first_expert_imbalance=steps[0].expert_imbalance,
        last_expert_imbalance=steps[-1].expert_imbalance,
        peak_memory_gib=round(run.peak_memory_bytes / 2**30, 2),
        total_s=round(sum(step.step_ms for step in steps) / 1e3, 1),
        versions=versions("transformers"),
        hardware=hardware(job.device),
    )
