"""Ranks are killed, stopped and started again at random times; the others go on, and every result is right."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from random import Random

from attack.configuration import draw
from attack.on_ranks import Holdings, least
from attack.serving import End, Right, Service, serve
from attack.strikes import Strike, Strikes
from fusco.ranks.progress import new_store

TIMEOUT_S = 4.0
_WORLDS = ((3, 1), (3, 3), (4, 2), (4, 4), (5, 5), (6, 2), (6, 3), (7, 7), (8, 4))
_NUM_STRIKES = 12  # of a case, after each of which all ranks are there again
_LIMIT_S = 120.0  # of what has no other limit
_NEXT_STEP_S, _SLACK_S = 1.0, 1.5  # after a kill, and what a machine adds for each process that waits for a core
_BUSY = 4.0  # processes that run or wait for each core
_NUM_TIMES = 3  # that are compared
_GROWTH_MIB = 8.0  # what a process needs from its first rounds on takes 4 to 5, and no more in 25 generations
_BETWEEN_VICTIMS_S = (0.0, 0.01, 0.05, 0.15)  # while others shrink, for the most part


def go_on(random: Random, strikes: Strikes, *name: int | str) -> str:
    """Strike ranks of one communicator and start others in their places, again and again; return a summary.

    Stopped ones continue, and learn that they are out. Some new ones are killed while they join. ``strikes`` counts.
    """
    configuration = draw(random, _WORLDS, TIMEOUT_S)
    rails = random.choice(("", "lo")) if configuration.num_ranks != configuration.setup.ranks_per_node else ""
    what = f"{configuration}, rails {rails or 'none'}"
    store = new_store()
    service = Service(
        port=store.port, num_ranks=configuration.num_ranks, setup=configuration.setup, rails=rails, name=name
    )
    world, times = _World(service, what, strikes), []
    try:
        world.start(range(service.num_ranks), is_new=False)
        world.await_right(range(service.num_ranks))
        for _ in range(_NUM_STRIKES):
            times.append(_strike(world, random))
            _restart(world, random)
        world.end()
    finally:
        world.kill()
    first_s, last_s = min(times), max(times)
    done = f"{world.num_struck} struck, right after {first_s:.2f} to {last_s:.2f} s"
    return f"{done}, grew by {world.grown_mib:.1f} MiB: {what}"


def _strike(world: _World, random: Random) -> float:
    """Kill or stop ranks, one after the other; return the seconds until all others were right again."""
    num_ranks = world.service.num_ranks
    victims = random.sample(range(num_ranks), random.choice((1, 1, 2, min(3, num_ranks - 1))))
    kinds = [random.choice((*[signal.SIGKILL] * 7, signal.SIGSTOP)) for _ in victims]
    left, num_stopped = [rank for rank in range(num_ranks) if rank not in victims], kinds.count(signal.SIGSTOP)
    time.sleep(random.uniform(0, 0.3))
    for victim, kind in zip(victims, kinds, strict=True):
        world.strike(victim, kind)
        struck_at = time.monotonic()
        time.sleep(random.choice(_BETWEEN_VICTIMS_S))
    told = world.await_right(left)
    strikes = ", ".join(f"{kind.name} to rank {rank}" for kind, rank in zip(kinds, victims, strict=True))
    late_s, slack_s = max(each[-1].at for each in told.values()) - struck_at, _SLACK_S * max(1.0, _load())
    world.strikes.late_s["SIGSTOP" if num_stopped else "SIGKILL"].append(late_s - TIMEOUT_S * num_stopped)
    assert late_s < _NEXT_STEP_S + slack_s + TIMEOUT_S * num_stopped, f"{strikes} on {world.what}: {late_s:.2f} s"
    for rank, each in told.items():
        named, gone = ({peer for message in each for peer in getattr(message, what)} for what in ("named", "gone"))
        assert gone == set(victims), f"{strikes} on {world.what}: rank {rank} lost {gone}"
        # A rank that another one has not waited for any longer names that one, as it has called shrink.
        # So is one that waits for a core for longer than the limit, on a machine that has more to do.
        assert named & set(victims) or _load() > _BUSY, f"{strikes} on {world.what}: rank {rank} named {named}: {told}"
        world.strikes.slow[rank] += not named & set(victims)
    assert len({each[-1].lost for each in told.values()}) == 1, f"{strikes} on {world.what}: {told}"
    world.continue_stopped()
    return late_s


def _restart(world: _World, random: Random) -> None:
    """Start processes in the places of those that were struck; some are killed while they join, and started again."""
    absent = world.absent
    world.start(absent, is_new=True)
    if random.random() < 0.25:
        time.sleep(random.uniform(0, 0.5))
        victim = random.choice(absent)
        world.strike(victim, signal.SIGKILL)
        world.start([victim], is_new=True)
    world.await_right(range(world.service.num_ranks))


def _load() -> float:
    return os.getloadavg()[0] / (os.cpu_count() or 1)


@dataclass
class _World:
    """The processes of a service, by rank, and those that were stopped."""

    service: Service
    what: str
    strikes: Strikes
    processes: dict[int, tuple[BaseProcess, Connection]] = field(default_factory=dict)
    stopped: list[tuple[BaseProcess, Connection]] = field(default_factory=list)
    num_struck: int = 0
    holdings: dict[int, list[Holdings]] = field(default_factory=dict)  # of the process of a rank, with all ranks there

    @property
    def absent(self) -> list[int]:
        """Ranks without a process."""
        return [rank for rank in range(self.service.num_ranks) if rank not in self.processes]

    @property
    def grown_mib(self) -> float:
        """The most that the memory of a process has grown, from its first times with all ranks to its last."""
        found = [each for each in self.holdings.values() if len(each) > 2 * _NUM_TIMES]
        return max((least(each[-_NUM_TIMES:])[0] - least(each[:_NUM_TIMES])[0] for each in found), default=0.0)

    def start(self, ranks: Collection[int], *, is_new: bool) -> None:
        """Start a process for each of these ranks."""
        context = multiprocessing.get_context("forkserver")
        for rank in ranks:
            here, there = context.Pipe()
            arguments = {"is_new": is_new}
            process = context.Process(target=serve, args=(self.service, rank, there), kwargs=arguments, daemon=True)
            process.start()
            there.close()
            self.processes[rank], self.holdings[rank] = (process, here), []

    def strike(self, rank: int, kind: signal.Signals) -> None:
        """Kill or stop the process of a rank."""
        process, pipe = self.processes.pop(rank)
        try:
            os.kill(process.pid, kind)
        except ProcessLookupError:
            raise AssertionError(f"{self.what}: rank {rank} has ended: {self._received(pipe, rank)!r}") from None
        num_ranks, rails = self.service.num_ranks, self.service.rails or "none"
        num_nodes = num_ranks // self.service.setup.ranks_per_node
        self.strikes.counts[Strike(kind.name, num_ranks, num_nodes, rails)] += 1
        self.num_struck += 1
        if kind == signal.SIGSTOP:
            self.stopped.append((process, pipe))

    def await_right(self, ranks: Collection[int]) -> dict[int, list[Right]]:
        """Return what each of these ranks has said until it was right with just their processes as members."""
        told: dict[int, list[Right]] = {rank: [] for rank in ranks}
        pids = {rank: self.processes[rank][0].pid for rank in ranks}
        deadline = time.monotonic() + _LIMIT_S
        while waiting := {
            self.processes[rank][1]: rank
            for rank, messages in told.items()
            if not messages or messages[-1].pids != pids
        }:
            late = f"{self.what}: {sorted(waiting.values())} not right with {[*ranks]}, but {told}"
            assert time.monotonic() < deadline, late
            for pipe in wait(list(waiting), timeout=1.0):
                rank, message = waiting[pipe], self._received(pipe, waiting[pipe])
                assert isinstance(message, Right), f"{self.what}: rank {rank}: {message!r}"
                told[rank].append(message)
                if len(message.pids) == self.service.num_ranks:
                    self.holdings[rank].append(message.holdings)
        return told

    def continue_stopped(self) -> None:
        """Let stopped processes continue: they learn that they are left out, and hold nothing."""
        for process, _ in self.stopped:
            os.kill(process.pid, signal.SIGCONT)
        for process, pipe in self.stopped:
            ended = self._end_of(process, pipe)
            assert "go on without it" in ended.excluded, f"{self.what}: {ended}"
        self.stopped = []

    def end(self) -> None:
        """Tell all processes to end; none holds anything, or has more than before."""
        for _, pipe in self.processes.values():
            pipe.send("end")
        for process, pipe in self.processes.values():
            ended = self._end_of(process, pipe)
            assert not ended.excluded, f"{self.what}: {ended}"
        self.processes = {}
        for rank, each in self.holdings.items():
            if len(each) > 2 * _NUM_TIMES:
                (mib, *before), (mib_after, *after) = least(each[:_NUM_TIMES]), least(each[-_NUM_TIMES:])
                has_more = any(late > early for early, late in zip(before, after, strict=True))
                report = f"{self.what}: rank {rank} held {each[:_NUM_TIMES]}, then {each[-_NUM_TIMES:]}"
                assert not has_more, report
                assert mib_after - mib < _GROWTH_MIB, report

    def kill(self) -> None:
        """Kill all processes that are left."""
        for process, _ in (*self.processes.values(), *self.stopped):
            process.kill()

    def _end_of(self, process: BaseProcess, pipe: Connection) -> End:
        """Return the last message of a process, which then ends."""
        message: object = None
        while not isinstance(message, End):
            assert pipe.poll(_LIMIT_S), f"{self.what}: {process.name} does not end"
            message = self._received(pipe, -1)
            assert isinstance(message, (Right, End)), f"{self.what}: {message!r}"
        assert message.still_held == [], f"{self.what}: {message}"
        process.join(_LIMIT_S)
        assert process.exitcode == 0, f"{self.what}: exit code {process.exitcode}"
        return message

    def _received(self, pipe: Connection, rank: int) -> object:
        try:
            return pipe.recv()
        except EOFError as error:
            raise AssertionError(f"{self.what}: the process of rank {rank} has ended") from error
