"""Ranks are killed, stopped and started again at random times; the others go on, and every result is right."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from random import Random

import torch

from attack.configuration import draw
from attack.on_ranks import Holdings, least
from attack.serving import End, Right, Service, serve
from attack.strikes import Strike, Strikes
from fusco import Settings, Topology
from fusco.bench.ranks.emulation import emulated_network
from fusco.bench.ranks.progress import new_store

TIMEOUT_S = {"cpu": 4.0, "cuda": 12.0}  # ranks that shared a GPU took more than 8 s to connect over NCCL
_WORLDS = {"cpu": ((3, 1), (3, 3), (4, 2), (4, 4), (5, 5), (6, 2), (6, 3), (7, 7), (8, 4))}
_WORLDS["cuda"] = ((2, 1), (2, 2), (4, 2), (4, 4))
_NUM_STRIKES = 12  # of a case, after each of which all ranks are there again
_LIMIT_S = 120.0  # of what has no other limit
# After a kill, on CUDA with new memory and connections, and what a machine adds for each process that waits for a core.
_NEXT_STEP_S, _SLACK_S = {"cpu": 1.0, "cuda": 10.0}, 1.5
_BUSY = 4.0  # processes that run or wait for each core
_NUM_TIMES = 3  # that are compared
_GROWTH_MIB = 8.0  # what a process needs from its first rounds on takes 4 to 5, and no more in 25 generations
_BETWEEN_VICTIMS_S = (0.0, 0.01, 0.05, 0.15)  # while others shrink, for the most part


def go_on(random: Random, strikes: Strikes, *name: int | str, device: str = "cpu", records: Path | None = None) -> str:
    """Strike ranks of one communicator and start others in their places, again and again; return a summary.

    Stopped ones continue, and learn that they are out. Some new ones are killed while they join. ``strikes`` counts,
    and a file of ``records`` gets a line for each strike.
    """
    configuration = draw(random, _WORLDS[device], TIMEOUT_S[device])
    setup, num_ranks = configuration.setup, configuration.num_ranks
    is_cpu, environments = device == "cpu", [{}] * num_ranks
    rails = random.choice(("", "lo")) if is_cpu and num_ranks != setup.ranks_per_node else ""
    if not is_cpu:
        setup = replace(setup, device=device, settings=Settings(timeout_s=TIMEOUT_S[device]))
        topology = Topology.of_equal_nodes(num_ranks, setup.ranks_per_node)
        environments = emulated_network(topology, os.environ, torch.cuda.device_count())
    store = new_store()
    service = Service(
        port=store.port, num_ranks=num_ranks, setup=setup, rails=rails, name=name, environments=tuple(environments)
    )
    world, times = _World(service, f"{configuration}, rails {rails or 'none'}", strikes, records), []
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
    return f"{done}, grew by {world.grown_mib:.1f} MiB: {world.what}"


def _strike(world: _World, random: Random) -> float:
    """Kill or stop ranks, one after the other; return the seconds until all others were right again."""
    num_ranks, device = world.service.num_ranks, world.service.setup.device
    victims = random.sample(range(num_ranks), random.choice((1, 1, min(2, num_ranks - 1), min(3, num_ranks - 1))))
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
    world.record(strikes, struck_at, [message for each in told.values() for message in each])
    after_limit_s = late_s - TIMEOUT_S[device] * num_stopped
    world.strikes.late_s["SIGSTOP" if num_stopped else "SIGKILL"].append(after_limit_s)
    assert after_limit_s < _NEXT_STEP_S[device] + slack_s, f"{strikes} on {world.what}: {late_s:.2f} s"
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
    records: Path | None
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

    def record(self, strikes: str, struck_at: float, told: Collection[Right]) -> None:
        """Write when the last rank had named a failure, had shrunk and was right, in seconds after the last strike."""
        if self.records:
            times = {name: max(getattr(each, name) for each in told) for name in ("named_at", "shrunk_at", "at")}
            named_s, shrunk_s, right_s = (round(at - struck_at, 4) for at in times.values())
            setup, ranks = self.service.setup, self.service.num_ranks
            place = {"device": setup.device, "ranks": ranks, "ranks_per_node": setup.ranks_per_node}
            line = {**place, "strikes": strikes, "named_s": named_s, "shrunk_s": shrunk_s, "right_s": right_s}
            with self.records.open("a") as lines:
                lines.write(json.dumps({"kind": "strike", **line}) + "\n")

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
            if self.service.is_on_cpu and len(each) > 2 * _NUM_TIMES:
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
