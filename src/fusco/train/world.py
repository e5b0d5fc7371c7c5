"""Run a job on processes started here, or on the ranks that torchrun has started."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import torch.distributed as dist

from fusco.bench.json_lines import write_json_lines
from fusco.bench.names import STDOUT
from fusco.cpu.kernels.warm_up import warm_up_cpu
from fusco.ranks.local_world import LocalWorld
from fusco.ranks.progress import ProgressReporter, latest_note, watching
from fusco.ranks.torchrun import Launched, join_torchrun, launched
from fusco.train.job import TrainingJob
from fusco.train.rank import train_rank
from fusco.train.records import Run, StepRecord

_LIMIT_S = 7 * 24 * 3600.0  # of a whole run; ranks that die are detected at once


@contextmanager
def joined_by_torchrun(device: str) -> Iterator[Launched | None]:
    """Join the ranks that torchrun has started, for the ``with`` block; yield ``None`` if it has started none."""
    if launched() is None:
        yield None
        return
    rank = join_torchrun(device)
    try:
        yield rank
    finally:
        dist.destroy_process_group()


def run_here(
    job: TrainingJob, report: Callable[[int, str], None], *, keeps_routing: bool = False, log: Path | None = None
) -> list[Run]:
    """Run a job on ranks started on this machine.

    ``report`` is called periodically with the number of finished steps and a description of the latest one. A record of
    every step is appended to ``log`` when it is done. With ``keeps_routing`` runs include the routing of the last step.
    """
    warm_up_cpu()  # in this process, so that the ranks load compiled kernels from disk
    with LocalWorld(job.num_ranks, job.device, limit_s=_LIMIT_S) as world:

        def on_progress(num_done: int) -> None:
            report(num_done, latest_note(world.store))

        with watching(world.store, on_progress):
            path = log.resolve() if log and log != STDOUT else log  # the ranks' working directory may differ
            return world.run(_train_local_rank, job.num_ranks, job, world.store.port, keeps_routing, path)[0]


def run_joined(
    job: TrainingJob, report: Callable[[int, str], None], *, keeps_routing: bool = False, log: Path | None = None
) -> list[Run]:
    """Run a job on the ranks of torchrun, which have joined; arguments as for ``run_here``."""
    numbers, path = count(1), log if dist.get_rank() == 0 else None
    return train_rank(job, _logging(path, lambda latest: report(next(numbers), latest)), keeps_routing=keeps_routing)


def describe(step: StepRecord) -> str:
    """Describe a step in one line."""
    return (
        f"{step.dispatcher}, step {step.step + 1}: loss {step.loss:.3f}, {step.tokens_per_s:,} tokens/s, dispatch and "
        f"combine {step.shuffle_share:.0%}, busiest expert {step.expert_imbalance:.2f} x mean"
    )


def _train_local_rank(
    _: dist.ProcessGroup,
    job: TrainingJob,
    port: int,
    keeps_routing: bool,  # noqa: FBT001  passed by position
    log: Path | None,
) -> list[Run]:
    if dist.get_rank() != 0:
        return train_rank(job, lambda _: None, keeps_routing=keeps_routing)
    return train_rank(job, _logging(log, ProgressReporter(port).advance), keeps_routing=keeps_routing)


def _logging(log: Path | None, report: Callable[[str], None]) -> Callable[[StepRecord], None]:
    """Return a function that appends the record of a step to a file and reports its description."""

    def on_step(step: StepRecord) -> None:
        write_json_lines([step], log, appends=True)
        report(describe(step))

    return on_step
