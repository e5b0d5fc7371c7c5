"""What attacks have ranks do."""

from __future__ import annotations

import gc
import itertools
import os
import socket
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch.distributed as dist
from fault_jobs import Fate, _error_of, _held_in_the_end
from rank_setup import Setup

import fusco
from attack.configuration import Configuration
from attack.rounds import work


def arrive(group: dist.ProcessGroup) -> None:
    """Import all of this, so that faults strike no rank at that."""


def do_rounds(group: dist.ProcessGroup, configuration: Configuration, *name: int | str) -> list[str]:
    """Make a communicator and work with it; returns the kinds of rounds."""
    with configuration.setup.open(group) as comm:
        return [work(comm, configuration.setup, *name, number) for number in range(configuration.num_rounds)]


@dataclass(frozen=True)
class Holdings:
    """What a process holds."""

    private_mib: float
    descriptors: int
    threads: int
    mappings: int

    @classmethod
    def now(cls) -> Holdings:
        gc.collect()
        status = Path("/proc/self/status").read_text().splitlines()
        private = next(int(line.split()[1]) / 1024 for line in status if line.startswith("RssAnon"))
        return cls(
            private_mib=private,
            descriptors=len(os.listdir("/proc/self/fd")),
            threads=len(os.listdir("/proc/self/task")),
            mappings=sum("/dev/shm" in line for line in Path("/proc/self/maps").read_text().splitlines()),
        )


def keep_on(
    group: dist.ProcessGroup, setup: Setup, num_rounds: int, *name: int | str
) -> tuple[list[Holdings], Holdings]:
    """Many rounds on one communicator; what is held after each third of them, and when it is closed."""
    holdings = []
    with setup.open(group) as comm:
        for third in range(3):
            for number in range(num_rounds // 3):
                work(comm, setup, *name, third, number)
            holdings.append(Holdings.now())
    return holdings, Holdings.now()


def labour(group: dist.ProcessGroup, configuration: Configuration, longest_s: float, *name: int | str) -> Fate:
    """Make communicators, work with them and close them, over and over, until a rank fails; then close the last."""
    fate, random, ends_at = Fate(), Random(repr(name)), time.monotonic() + longest_s
    for number in itertools.count():
        if fate.text or time.monotonic() > ends_at:
            break
        try:
            with configuration.setup.open(group) as comm:
                try:
                    for turn in range(random.choice((0, 3, 50))):
                        work(comm, configuration.setup, *name, number, turn)
                except fusco.PeerFailureError as error:
                    fate.note(error)
                    fate.later_error = _error_of(lambda comm=comm: comm.shuffle({}, {}))
                began_to_close = time.monotonic()
            fate.closing_s = time.monotonic() - began_to_close
        except fusco.PeerFailureError as error:
            fate.note(error)
    fate.still_held = [*_held_in_the_end(), *(t.name for t in threading.enumerate() if t.name.startswith("fusco"))]
    return fate


def do_rounds_beside_strangers(
    group: dist.ProcessGroup, configuration: Configuration, ports: Path, *name: int | str
) -> list[str]:
    """The same with every listening port of Python's sockets left in a folder, for strangers to find."""
    listen = socket.socket.listen

    def listen_and_tell(self: socket.socket, *backlog: int) -> None:
        listen(self, *backlog)
        if self.family == socket.AF_INET:
            (ports / str(self.getsockname()[1])).touch()

    socket.socket.listen = listen_and_tell
    try:
        return do_rounds(group, configuration, *name)
    finally:
        socket.socket.listen = listen
