"""Byte streams on a simulated device: plain copies, and the tables that a kernel gets for the rest."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from simulated_device import Machine, OnDevice
from simulated_kernels import NodeWords, SimulatedLibrary

from fusco.cuda.kernels.comm import comm_type
from fusco.cuda.kernels.copy_segments import copy_segments as copy_on_device
from fusco.cuda.kernels.launcher import Launcher
from generator import any_bits
from reference.copy_segments import copy_segments

SRC = any_bits((5000,), torch.uint8, "src")


class Counted(SimulatedLibrary):
    """Counts launches."""

    num_launches = 0

    def get(self, name: str, constants: Any) -> Any:
        self.num_launches += 1
        return super().get(name, constants)


def copied(*segments: tuple[int, int, int]) -> tuple[torch.Tensor, int]:
    """What the destination is after a copy of (source offset, destination offset, size), and how many launches."""
    machine = Machine(0)
    library = Counted(machine, NodeWords(1))

    def program(rank: int) -> torch.Tensor:
        stream = machine.new_stream()
        launcher = Launcher(library, comm_type(1)(), stream.cuda_stream)
        table = torch.tensor(segments, dtype=torch.int64).view(-1, 3)
        with OnDevice(machine, stream):
            src, dst = SRC.clone(), torch.zeros(4000, dtype=torch.uint8)
            copy_on_device(launcher, src, table[:, 0], dst, table[:, 1], table[:, 2])
        machine.wait(lambda: stream.is_idle)
        return dst

    return machine.run(program, 1)[0], library.num_launches


@pytest.mark.parametrize(
    ("segments", "num_launches"),
    [
        ((), 0),
        (((0, 0, 0), (9, 9, 0)), 0),
        (((3, 17, 2000),), 0),  # one piece on both sides: no table, no kernel
        (((3, 17, 0),), 0),
        (((3, 17, 1), (1000, 100, 50)), 1),
        (((3, 2000, 16), (5, 5, 0), (0, 0, 1999), (9, 2016, 1)), 1),
    ],
)
def test_segments_arrive_with_as_few_launches_as_can_be(segments, num_launches):
    expected = torch.zeros(4000, dtype=torch.uint8)
    copy_segments(SRC, *_columns(segments, expected))
    dst, launched = copied(*segments)
    assert torch.equal(dst, expected)
    assert launched == num_launches


def _columns(segments: tuple[tuple[int, int, int], ...], dst: torch.Tensor) -> tuple[torch.Tensor, ...]:
    table = torch.tensor(segments, dtype=torch.int64).view(-1, 3)
    return table[:, 0], dst, table[:, 1], table[:, 2]
