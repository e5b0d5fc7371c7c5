"""Copiers on simulated GPUs, in virtual time."""

from __future__ import annotations

from simulated_gpus import SimulatedGpus

from fusco.offload import Copier, OffloadSettings
from fusco.offload.mover import TO_HOST

MB = 1 << 20


class Host:
    """Copiers of a simulated host, each with a stream of its caller."""

    def __init__(self, folder, num_gpus=2, **how):
        self.gpus, self.board = SimulatedGpus(num_gpus, **how), folder / "board"
        self.copiers, self.streams = {}, {}

    def open(self, device, **settings):
        with self.gpus.current(self.gpus.retain(device)):
            self.streams[device] = self.gpus.new_stream()
        machine = self.gpus.machine(self.board, self.streams.__getitem__)
        self.copiers[device] = Copier(device, OffloadSettings(min_bytes=0, **settings), machine)
        return self.copiers[device]

    def start(self, device, num_bytes, direction=TO_HOST):
        return self.copiers[device].copy(direction, (device + 1) << 40, 1 << 50, num_bytes)

    def work(self):
        """Let the copiers do what they can do now."""
        while sum(copier.links.mover.step() for copier in self.copiers.values() if copier.links):
            pass
        assert self.gpus.faults == []

    def step(self):
        """Go on to the end of the next copy on a link."""
        self.work()
        self.gpus.advance()
        self.work()

    def finish(self, *copies):
        """Return the seconds until all copies are done."""
        start = self.gpus.now_ns
        while not all(copy.is_done for copy in copies):
            self.step()
        return (self.gpus.now_ns - start) / 1e9

    def close(self):
        for copier in self.copiers.values():
            copier.close()
