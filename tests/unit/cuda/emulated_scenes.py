"""Worlds and plays whose kernels are emulated."""

from __future__ import annotations

from typing import Any

from emulator import EmulatedLibrary, Emulator
from scenes import Play, Scene
from simulated_device import Machine
from simulated_nodes import World

from fusco import Capacity, ExpertPlacement, Settings, Topology
from fusco.cuda.memory.layout import DeviceLayout

EPOCHS = [1, 2, 3]  # PLAN_EPOCH, ROWS_EPOCH and COMBINE_EPOCH of comm.cuh


class Emulated:
    """Worlds whose kernels are emulated."""

    def __init__(self, folder, order: int, patience: int = 1) -> None:
        self.machine = Machine(order)
        self.machine.processor = self._emulator = Emulator(folder, order, patience)
        self._order = order

    def world(
        self,
        layout: DeviceLayout,
        placement: ExpertPlacement,
        num_sms: int | None = None,
        max_resident: int | None = None,
    ) -> World:
        """Devices of a few SMs; a grid never has more blocks at once, or than ``max_resident``."""
        machine, emulator, sms = self.machine, self._emulator, num_sms or 1 + self._order % 4
        return World(layout, placement, machine, lambda: EmulatedLibrary(machine, emulator, sms, max_resident))


def alone(folder, program) -> Any:
    """What a program gives on the only rank of a world, with whatever kernels it launches."""
    capacity = Capacity(max_tokens_per_rank=1, max_bytes_per_token=8, num_topk=1)
    layout = DeviceLayout(Topology((0,)), capacity, Settings())
    return Emulated(folder, order=3).world(layout, ExpertPlacement.contiguous(1, 1)).run(program)[0]


class EmulatedPlay(Play):
    """A play whose kernels are emulated."""

    def __init__(self, scene: Scene, folder, **sizes: int) -> None:
        super().__init__(scene)
        self._folder, self._sizes = folder, sizes

    def run(self, order: int) -> Any:
        world = Emulated(self._folder, order).world(self.scene.layout, self.scene.placement, **self._sizes)
        return world.run(self._on_rank)
