"""Worlds of ranks in which a fault is under way: started, and what their ranks observed collected and judged."""

import os
import re
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from fault_jobs import TIMEOUT_S, Fate, Fault, die, no_op, run_with_fault, stop

from fusco.bench.ranks.local_world import LocalWorld

SLACK_S = 1.5  # more than a loaded machine takes to schedule all processes
CLOSING_S = 3.0
ONE_NODE, TWO_NODES = (4, 4), (4, 2)  # ranks, and ranks of each node


def shared_names() -> set[str]:
    """Return names in shared memory, without semaphores of multiprocessing, which any process may make for a moment."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.")}


@contextmanager
def world_with_victims(num_ranks, victims=(), start_method=None):
    """A world whose victims are killed at the end, while all others must exit by themselves."""
    names_before = shared_names()
    world = LocalWorld(num_ranks, start_method=start_method)
    try:
        world.run(no_op, num_ranks)
        yield world
    except BaseException:
        world.kill()
        raise
    finally:
        for victim in victims:
            world.processes[victim].kill()
        world.close()
    exit_codes = {rank: process.exitcode for rank, process in enumerate(world.processes) if rank not in victims}
    assert set(exit_codes.values()) <= {0}, exit_codes
    left = shared_names() - names_before
    assert not left, left


def survivors_of(fault, num_ranks):
    return [rank for rank in range(num_ranks) if rank not in fault.victims]


@dataclass(frozen=True)
class Struck:
    """A world in which a fault is under way; its end checks how its ranks exit."""

    world: LocalWorld
    fault: Fault
    ending: ExitStack

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.ending.__exit__(*error)

    def fates(self) -> dict[int, Fate]:
        """Return those of the survivors."""
        return collect(self.world, survivors_of(self.fault, self.world.world_size))


def strike(folder, *, topology=TWO_NODES, work=None, start_method=None, **of_fault) -> Struck:
    """Start ranks, some of which have a fault."""
    fault = Fault(times=folder, **of_fault)
    with ExitStack() as ending:
        victims = fault.victims if fault.how in (die, stop) else ()
        world = ending.enter_context(world_with_victims(topology[0], victims, start_method))
        world.start(run_with_fault, *topology, fault, work)
        return Struck(world, fault, ending.pop_all())


def collect(world, ranks) -> dict[int, Fate]:
    return dict(zip(ranks, world.results(ranks, timeout_s=4 * TIMEOUT_S + 10), strict=True))


def assert_all_name_the_victims(fates, fault, within_s):
    for rank, fate in fates.items():
        report = f"rank {rank}: {fate}, {fate.raised_at - fault.struck_at:.2f} s after the fault"
        assert fate.peers == fault.victims, report
        assert fate.text.startswith(f"rank {rank} gave up in "), report
        what, _, why = fate.text.partition(" Cause: ")
        assert re.search(r"phase '[^']+', waiting for rank\(s\) .+: expected .+, saw .+\.$", what), report
        assert all(re.search(rf"\brank(\(s\))? [\d, ]*\b{victim}\b", why) for victim in fault.victims), report
        assert fate.raised_at - fault.struck_at < within_s, report
        assert fate.closing_s < CLOSING_S, report
        assert fate.still_held == [], report


def assert_broken(fates):
    assert {fate.later_error for fate in fates.values()} == {"ClosedError"}
