"""Functions that attacks run on ranks."""

from __future__ import annotations

import ctypes
import gc
import itertools
import os
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch.distributed as dist
from fault_jobs import Fate, _error_of, held_in_the_end
from rank_setup import Setup

import fusco
from attack.configuration import Configuration
from attack.rounds import work
from fusco.cpu.recycler import OutputRecycler


def no_op(group: dist.ProcessGroup) -> None:
    """Do nothing. Importing this module before an attack keeps faults out of the import."""


def do_rounds(group: dist.ProcessGroup, configuration: Configuration, *name: int | str) -> list[str]:
    """Create a communicator and use it; return the kinds of rounds."""
    with configuration.setup.open(group) as comm:
        return [work(comm, configuration.setup, *name, number) for number in range(configuration.num_rounds)]


@dataclass(frozen=True)
class Holdings:
    """Resources of a process.

    Attributes:
        private_mib: anonymous resident memory that is in use. What glibc keeps after ``free``, and released outputs
            that communicators keep, are returned first: they vary by 25 MiB and more from round to round and would
            hide any leak.
        descriptors: open files.
        threads: threads.
        mappings: mappings of shared memory.

    """

    private_mib: float
    descriptors: int
    threads: int
    mappings: int

    @classmethod
    def now(cls) -> Holdings:
        gc.collect()
        for each in gc.get_objects():
            if type(each) is OutputRecycler:  # other classes warn when they are asked
                each._spares.clear()
        ctypes.CDLL(None).malloc_trim(0)
        status = Path("/proc/self/status").read_text().splitlines()
        private = next(int(line.split()[1]) / 1024 for line in status if line.startswith("RssAnon"))
        return cls(
            private_mib=private,
            descriptors=len(os.listdir("/proc/self/fd")),
            threads=len(os.listdir("/proc/self/task")),
            mappings=sum("/dev/shm" in line for line in Path("/proc/self/maps").read_text().splitlines()),
        )


def least(holdings: Sequence[Holdings]) -> tuple[float, int, int]:
    """Return the least memory, descriptors and mappings: a notice to a rank that is stopped has a descriptor, too."""
    found = [(each.private_mib, each.descriptors, each.mappings) for each in holdings]
    return tuple(map(min, zip(*found, strict=True)))


def soak(group: dist.ProcessGroup, setup: Setup, num_rounds: int, *name: int | str) -> tuple[list[Holdings], Holdings]:
    """Run many rounds on one communicator; return the resources held after each third of them, and after closing it."""
    holdings = []
    with setup.open(group) as comm:
        for third in range(3):
            for number in range(num_rounds // 3):
                work(comm, setup, *name, third, number)
            holdings.append(Holdings.now())
    return holdings, Holdings.now()


def work_until_failure(
    group: dist.ProcessGroup, configuration: Configuration, longest_s: float, *name: int | str
) -> Fate:
    """Create, use and close communicators until a rank fails; then close the last one."""
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
    fate.still_held = [*held_in_the_end(), *(t.name for t in threading.enumerate() if t.name.startswith("fusco"))]
    return fate


def do_rounds_with_foreign_clients(
    group: dist.ProcessGroup, configuration: Configuration, ports: Path, *name: int | str
) -> list[str]:
    """``do_rounds``, with every listening port of a Python socket recorded as a file name in a folder, for clients."""
    listen = socket.socket.listen

    def listen_and_record(self: socket.socket, *backlog: int) -> None:
        listen(self, *backlog)
        if self.family == socket.AF_INET:
            (ports / str(self.getsockname()[1])).touch()

    socket.socket.listen = listen_and_record
    try:
        return do_rounds(group, configuration, *name)
    finally:
        socket.socket.listen = listen
