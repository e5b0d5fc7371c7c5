"""What ranks do in tests of ``fusco train``."""

from __future__ import annotations

from torch.optim.optimizer import register_optimizer_step_pre_hook

from fusco.communicator import Communicator
from fusco.train.rank import train_rank


class RowsDidNotArriveError(Exception):
    """As if a wait on the device had run out."""


def train_until_rows_do_not_arrive(group, job, num_good):
    """What was done in which order, if synchronizing fails after ``num_good`` times."""
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
