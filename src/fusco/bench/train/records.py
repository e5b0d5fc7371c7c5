"""Results of training: a record of every step, and one of every run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt

from fusco.bench.harness.environment import Measurement, hardware, versions
from fusco.bench.train.job import TrainingJob
from fusco.fsdp.metrics import StepMetrics
from fusco.fsdp.timed_dispatcher import SECTIONS

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
    load_cv: float  # coefficient of variation of the experts' rows, mean over layers
    num_idle_experts: int  # of all layers
    waiting_share: float  # of the step, mean over ranks: dispatch and combine beyond those of the rank that waits least
    learning_rate: float
    memory_gib: float  # peak of any rank: allocated on its GPU, else resident in main memory
    held_out_loss: float | None = None  # after the step, if it was due
    mfu: float | None = None  # as in ``fusco.fsdp.StepMetrics``
    layers: dict[str, dict[str, float]] = field(default_factory=dict)  # loads: busiest, cv, num_idle, by layer

    @classmethod
    def of(cls, dispatcher: str, measured: StepMetrics, held_out: float | None) -> StepRecord:
        """Return the record of a step from its metrics."""
        names = ("gradient_norm", "load_cv", "num_idle_experts", "waiting_share", "shuffle_share", "memory_gib")
        numbers: dict[str, Any] = {name: round(getattr(measured, name), 6) for name in names}
        times: dict[str, Any] = {f"{section}_ms": round(ms, 4) for section, ms in measured.section_ms.items()}
        return cls(
            dispatcher=dispatcher,
            step=measured.step - 1,
            loss=round(measured.loss, 6),
            step_ms=round(measured.step_ms, 4),
            tokens_per_s=round(measured.tokens_per_s),
            expert_imbalance=round(measured.busiest_expert, 4),
            learning_rate=measured.learning_rate or 0.0,
            held_out_loss=None if held_out is None else round(held_out, 6),
            mfu=measured.mfu,
            layers={name: asdict(each) for name, each in measured.layers.items()},
            **numbers,
            **times,
        )

    def describe(self) -> str:
        """Describe the step in one line of at most 80 columns."""
        if self.held_out_loss is None:
            what = f"{self.tokens_per_s:,} tokens/s, busiest {self.expert_imbalance:.2f}x"
            return f"{self.dispatcher} {self.step + 1}: loss {self.loss:.3f}, {what}, shuffle {self.shuffle_share:.0%}"
        return (
            f"{self.dispatcher} {self.step + 1}: loss {self.loss:.3f}, held-out {self.held_out_loss:.3f}, "
            f"{self.tokens_per_s:,} tokens/s, busiest {self.expert_imbalance:.2f}x"
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
    held_out_loss: float | None  # after the last step
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
    sample: tuple[str, str] | None = None  # a prompt, and what the model wrote after it


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
    paths = {name: str(path) if (path := getattr(job, name)) else None for name in ("model", "export")}
    return RunRecord(
        dispatcher=steps[0].dispatcher,
        job={**asdict(job), "text": str(job.text or "Python sources"), **paths},
        num_parameters=run.num_parameters,
        first_loss=steps[0].loss,
        last_loss=round(sum(last) / len(last), 4),
        held_out_loss=steps[-1].held_out_loss,
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
