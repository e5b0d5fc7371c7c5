"""Ranks are killed, stopped and started again at random times; the others go on, and every result is right."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from random import Random

from elastic_jobs import JoinRequest, Served, join_and_serve, serve, wait_until_all_work

from attack import on_ranks
from attack.configuration import Configuration, draw
from fusco.ranks.local_world import LocalWorld

TIMEOUT_S = 4.0
_WORLDS = ((3, 1), (3, 3), (4, 2), (4, 4), (5, 5), (6, 2), (6, 3), (7, 7), (8, 4))
_NUM_ROUNDS = 4
_LIMIT_S = 60.0
_NEXT_STEP_S, _SLACK_S = 1.0, 1.5  # after a kill, and what a loaded machine adds
_BETWEEN_VICTIMS_S = (0.0, 0.01, 0.05, 0.15)  # while others shrink, for the most part


def go_on(random: Random, *name: int | str) -> str:
    """Kill or stop ranks, one after the other; return a summary. Stopped ones continue, and learn that they are out."""
    configuration = draw(random, _WORLDS, TIMEOUT_S)
    num_ranks = configuration.num_ranks
    victims = random.sample(range(num_ranks), random.choice((1, 1, 2, min(3, num_ranks - 1))))
    kinds = [random.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP)) for _ in victims]
    left = [rank for rank in range(num_ranks) if rank not in victims]
    what = f"{', '.join(f'{kind.name} to rank {rank}' for kind, rank in zip(kinds, victims, strict=True))}"
    what += f" on {configuration}"
    with ExitStack() as stack:
        world, _ = _working_world(stack, configuration, len(left), name)
        time.sleep(random.uniform(0, 0.6))
        for victim, kind in zip(victims, kinds, strict=True):
            os.kill(world.processes[victim].pid, kind)
            struck_at = time.monotonic()
            time.sleep(random.choice(_BETWEEN_VICTIMS_S))
        served = _results(world, left, what)
        stopped = [rank for rank, kind in zip(victims, kinds, strict=True) if kind == signal.SIGSTOP]
        for victim in stopped:
            os.kill(world.processes[victim].pid, signal.SIGCONT)
        _check_excluded(_results(world, stopped, what), what)
    _check_left(served, left, victims, what)
    late_s = max(each.failures[-1]["right_at"] for each in served.values() if each.failures) - struck_at
    limit_s = _NEXT_STEP_S + _SLACK_S + TIMEOUT_S * len(stopped)
    assert late_s < limit_s, f"{what}: the next right step came after {late_s:.2f} s"
    return f"right again after {late_s:.2f} s: {what}"


def come_back(random: Random, *name: int | str) -> str:
    """Kill a rank and start another process, which joins; sometimes that one is killed while it joins."""
    configuration = draw(random, _WORLDS, TIMEOUT_S)
    num_ranks, victim = configuration.num_ranks, random.randrange(configuration.num_ranks)
    left = [rank for rank in range(num_ranks) if rank != victim]
    dies_after_s = random.choice((None, None, random.uniform(0.0, 1.0)))
    what = f"rank {victim} killed and started again, killed again after {dies_after_s} s, on {configuration}"
    with ExitStack() as stack:
        world, signs = _working_world(stack, configuration, len(left), name, grows=True)
        context = multiprocessing.get_context("forkserver")
        results, of_process = context.Pipe()
        request = JoinRequest(port=world.store.port, num_ranks=num_ranks, signs=signs)
        arguments = (request, configuration.setup, _NUM_ROUNDS, of_process, *name)
        process = context.Process(target=join_and_serve, args=arguments, daemon=True)
        os.kill(world.processes[victim].pid, signal.SIGKILL)
        process.start()
        of_process.close()
        stack.callback(process.kill)
        if dies_after_s is not None:
            while not (signs / "asks").exists():
                time.sleep(0.001)
            time.sleep(dies_after_s * 0.2)
            process.kill()
            (signs / "enough").touch()
        served = _results(world, left, what)
        for rank, each in served.items():
            assert each.still_held == [], f"{what}: rank {rank} holds {each.still_held}"
            whole = tuple(range(num_ranks))
            assert each.ranks == whole or (dies_after_s is not None and each.ranks == tuple(left)), f"{what}: {each}"
        if dies_after_s is None:
            assert results.poll(_LIMIT_S), f"{what}: the process that joins gave no result"
            joined = results.recv()
            assert joined == Served(ranks=tuple(range(num_ranks))), f"{what}: {joined}"
    return what


def _working_world(
    stack: ExitStack, configuration: Configuration, num_left: int, name: Sequence[int | str], *, grows: bool = False
) -> tuple[LocalWorld, Path]:
    """Start ranks that serve, and wait until all of them work; the folder is that of their signs."""
    signs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    world = stack.enter_context(LocalWorld(configuration.num_ranks))
    stack.callback(world.kill)
    world.run(on_ranks.no_op, configuration.num_ranks)
    world.start(serve, configuration.num_ranks, configuration.setup, num_left, _NUM_ROUNDS, signs, *name, grows=grows)
    wait_until_all_work(signs, configuration.num_ranks)
    return world, signs


def _results(world: LocalWorld, ranks: Sequence[int], what: str) -> dict[int, Served]:
    served = {}
    for rank, (is_ok, outcome) in zip(ranks, world.collect(list(ranks), timeout_s=_LIMIT_S), strict=True):
        assert is_ok, f"{what}: rank {rank}: {getattr(outcome, 'traceback', outcome)}"
        served[rank] = outcome
    return served


def _check_left(served: dict[int, Served], left: Sequence[int], victims: Sequence[int], what: str) -> None:
    for rank, each in served.items():
        assert each.ranks == tuple(left), f"{what}: rank {rank} went on with {each.ranks}: {each}"
        named = {peer for failure in each.failures for peer in failure["peers"]}
        gone = {peer for failure in each.failures for peer in failure["gone"]}
        assert gone == set(victims), f"{what}: rank {rank} lost {gone}"
        # A rank that another one has not waited for any longer names that one, as it has called shrink.
        assert named & set(victims), f"{what}: rank {rank} named {named}: {each}"
        assert each.still_held == [], f"{what}: rank {rank} holds {each.still_held}"
    assert len({each.lost for each in served.values()}) == 1, f"{what}: {served}"


def _check_excluded(served: dict[int, Served], what: str) -> None:
    for rank, each in served.items():
        assert each.excluded, f"{what}: rank {rank} did not learn that it is left out: {each}"
        assert each.still_held == [], f"{what}: rank {rank} holds {each.still_held}"
