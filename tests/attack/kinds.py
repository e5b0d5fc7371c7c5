"""The kinds of attack: functions of a seed and a number that return a summary, or raise an error for a fault."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from random import Random
from typing import Any

from elastic_jobs import leave_and_rejoin
from fault_jobs import Fate
from struck_worlds import world_with_victims

from attack import elastic, moves, on_ranks, rails_attacks, saves, shim_attacks, throughput
from attack.configuration import LARGEST_WORLD, draw
from attack.foreign_clients import ForeignClients
from attack.on_ranks import least
from attack.strikes import Strikes
from fusco.bench.ranks.failures import RankFailedError
from fusco.bench.ranks.local_world import LocalWorld
from fusco.schedule import warm_up

_TIMEOUT_S, _SLACK_S = 4.0, 2.0  # timeout where ranks fail, and what a loaded machine adds
_MAX_WORK_S = 20.0  # longer than any rank takes to fail and to be detected
_SOAK_WORLDS = ((4, 2), (4, 4), (2, 1), (6, 3))
_FAULT_WORLDS = ((2, 1), (2, 2), (3, 1), (4, 2), (4, 4))
_CLIENT_WORLDS = ((2, 1), (2, 2), (4, 2))
_MAX_STARTING_S = 120.0  # until ranks have saved once
_LONGEST_SAVES_S = 1.0  # until a rank is killed; a save takes some 30 ms
_GRACE_S = 1.0  # for ranks to end after one that was killed in a save
_SOAK_ROUNDS = 240
_REJOINING_WORLDS, _NUM_REJOINS, _NUM_TIMES = ((3, 3), (3, 1), (4, 2), (6, 3)), 200, 5
_SLOWEST_RATIO, _NUM_TRIES = 1.03, 5  # of a machine that does nothing else, and where other processes take the cores
# Growth of memory in use from the first third to the last. 4 ranks grew by at most 0.3 MiB, in 1280 rounds as well.
_GROWTH_MIB = 2.0


class Attacks:
    """Attacks on ranks. The world of ranks is started at first use; an attack that kills ranks starts its own."""

    def __init__(self, seed: int, device: str = "cpu", records: Path | None = None) -> None:
        """On CUDA there are survivors only; a file of ``records`` gets a line for each of their strikes."""
        self._seed, self._device, self._records = seed, device, records
        self._world: LocalWorld | None = None
        self.strikes = Strikes()
        self.kinds: dict[str, Callable[[int], str]] = {
            "random": self.random,
            "soak": self.soak,
            "faults": self.faults,
            "clients": self.clients,
            "peers": lambda number: rails_attacks.hostile_peers(self._random_of("peers", number)),
            "shim": self.shim,
            "addresses": lambda number: rails_attacks.addresses(self._random_of("addresses", number)),
            "saves": self.saves,
            "moves": self.moves,
            "survivors": self.survivors,
            "rejoins": self.rejoins,
            "throughput": self.throughput,
        }
        warm_up()

    def random(self, number: int) -> str:
        """Rounds of every kind on a random communicator."""
        configuration = draw(self._random_of("random", number))
        name = (self._seed, "random", number)
        kinds = self._shared_world().run(on_ranks.do_rounds, configuration.num_ranks, configuration, *name)[0]
        return f"{len(kinds)} rounds on {configuration}"

    def soak(self, number: int) -> str:
        """Many rounds on one communicator: its resources must not grow after the first third."""
        configuration = draw(self._random_of("soak", number), _SOAK_WORLDS)
        arguments = (configuration.setup, _SOAK_ROUNDS, self._seed, "soak", number)
        outcomes = self._shared_world().run(on_ranks.soak, configuration.num_ranks, *arguments)
        for rank, ((first, *later), closed) in enumerate(outcomes):
            last = later[-1]
            counts = [(held.descriptors, held.threads, held.mappings) for held in (first, last)]
            assert counts[0] == counts[1], f"rank {rank} held {first}, then {last}"
            assert last.private_mib - first.private_mib < _GROWTH_MIB, f"rank {rank} grew from {first} to {last}"
            assert closed.mappings == 0, f"rank {rank} still holds shared memory once closed: {closed}"
        grown = max(holdings[-1].private_mib - holdings[0].private_mib for holdings, _ in outcomes)
        return f"{_SOAK_ROUNDS} rounds, grew by {grown:.2f} MiB at most, on {configuration}"

    def faults(self, number: int) -> str:
        """Ranks die or stop at a random time; all others name them within the timeout and release all resources."""
        random = self._random_of("faults", number)
        configuration = draw(random, _FAULT_WORLDS, _TIMEOUT_S)
        victims = sorted(random.sample(range(configuration.num_ranks), 2 if random.random() < 0.15 else 1))
        if len(victims) == configuration.num_ranks:
            victims = victims[:1]
        sign = random.choice((signal.SIGKILL, signal.SIGSTOP))
        delay_s = random.choice((random.uniform(0, 0.3), random.uniform(0.3, 4), random.uniform(0.3, 4)))
        work = (on_ranks.work_until_failure, configuration, _MAX_WORK_S, self._seed, "faults", number)
        what = f"{sign.name} to rank(s) {victims} after {delay_s:.3f} s on {configuration}"
        after_s, last = _strike(work, configuration.num_ranks, victims, sign, delay_s, what)
        where = last.text.partition(", waiting")[0].partition("gave up in ")[2]
        return f"named after {after_s:.2f} s in {where}: {what}"

    def moves(self, number: int) -> str:
        """A rank is killed while experts move; all others name it, and none has half an expert."""
        random = self._random_of("moves", number)
        configuration = draw(random, _FAULT_WORLDS, _TIMEOUT_S)
        victim, delay_s = random.randrange(configuration.num_ranks), random.uniform(0.2, 3)
        work = (moves.move_until_failure, configuration, _MAX_WORK_S, self._seed, "moves", number)
        what = f"rank {victim} killed after {delay_s:.3f} s on {configuration}"
        _strike(work, configuration.num_ranks, [victim], signal.SIGKILL, delay_s, what, moves.warm_up)
        return what

    def clients(self, number: int) -> str:
        """Rounds of every kind while foreign clients send garbage to every listening port."""
        random = self._random_of("clients", number)
        configuration = draw(random, _CLIENT_WORLDS)
        name = (self._seed, "clients", number)
        with tempfile.TemporaryDirectory() as ports, ForeignClients(Path(ports), random.randrange(1 << 30)) as clients:
            function, num_ranks = on_ranks.do_rounds_with_foreign_clients, configuration.num_ranks
            self._shared_world().run(function, num_ranks, configuration, Path(ports), *name)
        return f"{clients.num_connections} connections during {configuration.num_rounds} rounds on {configuration}"

    def shim(self, number: int) -> str:
        """Ranks of ``deep_ep`` that call different things: all raise soon, and the next call in step works."""
        num_ranks, name = self._random_of("shim", number).choice((2, 3, 4)), f"{self._seed} shim {number}"
        num_raised = self._shared_world().run(shim_attacks.out_of_step, num_ranks, name)[0]
        return f"{num_raised} calls out of step on {num_ranks} ranks"

    def survivors(self, number: int) -> str:
        """Ranks of one communicator are killed and stopped again and again, and others take their places."""
        options = {"device": self._device, "records": self._records}
        return elastic.go_on(self._random_of("survivors", number), self.strikes, self._seed, number, **options)

    def rejoins(self, number: int) -> str:
        """A rank leaves and joins again, 200 times: no rank holds more than after the first third."""
        configuration = draw(self._random_of("rejoins", number), _REJOINING_WORLDS)
        num_ranks, third = configuration.num_ranks, _NUM_REJOINS // 3
        names_before = set(os.listdir("/dev/shm"))
        with LocalWorld(num_ranks) as world:
            arguments = (configuration.setup, _NUM_REJOINS, world.store.port)
            held = world.run(leave_and_rejoin, num_ranks, *arguments)
        pairs = [(least(each[third : third + _NUM_TIMES]), least(each[-_NUM_TIMES:])) for each in held]
        for rank, ((before_mib, *before), (after_mib, *after)) in enumerate(pairs):
            report = f"rank {rank} of {configuration} held {held[rank][third]}, then {held[rank][-1]}"
            assert before == after, report
            assert after_mib - before_mib < _GROWTH_MIB, report
        left = {name for name in set(os.listdir("/dev/shm")) - names_before if name.startswith("fusco")}
        assert not left, f"left in /dev/shm: {left}"
        grown = max(after[0] - before[0] for before, after in pairs)
        counts = ", ".join(f"{after[1]} and {after[2]}" for _, after in pairs)
        return (
            f"{_NUM_REJOINS} rejoins, grew by {grown:.2f} MiB at most, descriptors and mappings of ranks as after the "
            f"first third ({counts}), on {configuration}"
        )

    def throughput(self, number: int) -> str:
        """Ranks that go on after others have left are as fast as a new communicator of theirs, in one of some tries."""
        case, tries = throughput.CASES[number % len(throughput.CASES)], list[throughput.Ratio]()
        with LocalWorld(case.num_ranks) as world:
            while len(tries) < _NUM_TRIES and (not tries or tries[-1].elapsed > _SLOWEST_RATIO):
                measured = world.run(throughput.time_in_turn, case.num_ranks, case)
                tries.append(throughput.Ratio.of(measured[: case.num_left]))
        what = f"shrunk / new {', then '.join(map(str, tries))}: {case}"
        assert tries[-1].elapsed <= _SLOWEST_RATIO, what
        return what

    def saves(self, number: int) -> str:
        """Checkpoints into one folder, until a rank is killed or has no room: one complete save is what loads."""
        random = self._random_of("saves", number)
        num_ranks, is_killed = random.choice((1, 2, 3, 4)), random.random() < 0.5
        victim, room = random.randrange(num_ranks), -1 if is_killed else random.randrange(saves.LARGEST_FILE)
        with tempfile.TemporaryDirectory() as folder, LocalWorld(num_ranks, limit_s=180.0) as world:
            path, progress = Path(folder, "checkpoint"), Path(folder, "progress")
            progress.mkdir()
            world.start(saves.save_until_failure, num_ranks, path, progress, victim, random.randint(2, 9), room)
            deadline = time.monotonic() + _MAX_STARTING_S
            while not any(progress.iterdir()):
                assert time.monotonic() < deadline, f"no save within {_MAX_STARTING_S} s"
                time.sleep(0.01)
            if is_killed:
                time.sleep(random.uniform(0, _LONGEST_SAVES_S))
                world.processes[victim].kill()
            # Of a death gloo tells those next to it in a ring; others wait for these, which live on here.
            with suppress(RankFailedError) if is_killed else nullcontext():
                world.collect(range(num_ranks), timeout_s=_MAX_WORK_S, grace_s=_GRACE_S if is_killed else _MAX_WORK_S)
            world.kill()
            last = max(int(file.name) for file in progress.iterdir())
            why = "killed" if is_killed else f"with room for {room} bytes"
            what = f"rank {victim} of {num_ranks} {why} in or after save {last}"
            found = saves.values_in(path)
            assert len(found) == 1, f"{what}: loads a mixture of {sorted(found)}"
            assert found <= {last, last + 1}, f"{what}: loads {found}"
            left = [file.name for file in path.iterdir()]
            assert len(left) == 2, f"{what}: the next save left {left}"
        return what

    def close(self) -> None:
        """Kill the ranks."""
        if self._world:
            self._world.kill()
            self._world.close()
            self._world = None

    def _random_of(self, kind: str, number: int) -> Random:
        return Random(repr((self._seed, kind, number)))

    def _shared_world(self) -> LocalWorld:
        if self._world is None:
            self._world = LocalWorld(LARGEST_WORLD, limit_s=180.0)
            # The largest group first: PyTorch names groups by how many each process knows already.
            for num_ranks in range(LARGEST_WORLD, 0, -1):
                self._world.run(on_ranks.no_op, num_ranks)
        return self._world


def _strike(
    work: tuple[Any, ...],
    num_ranks: int,
    victims: list[int],
    sign: signal.Signals,
    delay_s: float,
    what: str,
    before: Callable[..., object] = on_ranks.no_op,
) -> tuple[float, Fate]:
    """Strike ranks during ``work``; return after how many seconds the last of the others raised, and its fate."""
    survivors = [rank for rank in range(num_ranks) if rank not in victims]
    with world_with_victims(num_ranks, victims) as world:
        world.run(before, num_ranks)
        world.start(work[0], num_ranks, *work[1:])
        time.sleep(delay_s)
        for victim in victims:
            os.kill(world.processes[victim].pid, sign)
        struck_at = time.monotonic()
        outcomes = world.collect(survivors, timeout_s=_MAX_WORK_S + 4 * _TIMEOUT_S)
    for rank, (is_ok, fate) in zip(survivors, outcomes, strict=True):
        assert is_ok, f"{what}: rank {rank}: {fate}"
        _check_fate(fate, rank, victims, struck_at, what)
    last = max((fate for _, fate in outcomes), key=lambda fate: fate.raised_at)
    return last.raised_at - struck_at, last


def _check_fate(fate: Fate, rank: int, victims: list[int], struck_at: float, what: str) -> None:
    report = f"{what}: rank {rank} after {fate.raised_at - struck_at:.2f} s: {fate}"
    assert fate.peers, report
    # Of two victims, the one detected first may be named alone.
    assert set(fate.peers) == set(victims) if len(victims) == 1 else set(fate.peers) <= set(victims), report
    assert fate.raised_at - struck_at < _TIMEOUT_S + _SLACK_S, report
    assert fate.later_error in ("", "ClosedError"), report
    assert fate.closing_s < _TIMEOUT_S + _SLACK_S, report
    assert fate.still_held == [], report
