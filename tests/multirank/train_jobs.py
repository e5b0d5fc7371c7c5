"""Functions on ranks for tests of ``fusco train``."""

from __future__ import annotations

import time

from torch.optim.optimizer import register_optimizer_step_pre_hook

from fusco.api.communicator import Communicator
from fusco.bench.train.rank import train_rank


def train_with_slow_reports(group, job, seconds):
    """The times of steps, in milliseconds, where rank 0 takes its time to report each."""
    (run,) = train_rank(job, lambda _: time.sleep(seconds) if group.rank() == 0 else None)
    return [step.step_ms for step in run.steps]


def second_losses_of(_, jobs):
    """The loss of the second step of each job."""
    runs = [train_rank(job, lambda _: None)[0] for job in jobs]
    return [run.steps[1].loss for run in runs]


class RowsDidNotArriveError(Exception):
    """Simulates a wait on the device that has timed out."""


def train_until_rows_do_not_arrive(group, job, num_good):
    """Return the order of operations if synchronizing fails after ``num_good`` times."""
    done, synchronize = [], Communicator.synchronize

    def synchronize_or_fail(comm):
        done.append("synchronize")
        synchronize(comm)
        if done.count("synchronize") > num_good:
            raise RowsDidNotArriveError

    Communicator.synchronize = synchronize_or_fail
    hook = register_optimizer_step_pre_hook(lambda *_: done.append("step"))
    try:
        train_rank(job, lambda _: done.append("report"))
    except RowsDidNotArriveError:
        done.append("error")
    finally:
        Communicator.synchronize = synchronize
        hook.remove()
    return done
