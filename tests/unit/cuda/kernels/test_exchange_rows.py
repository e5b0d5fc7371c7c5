"""The kernel ``exchange_rows`` on the emulator: rows arrive in order of rank, also where ranks have unequal budgets."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from emulated_scenes import Emulated
from emulator import is_available
from simulated_nodes import Rank

from comparison import assert_same_bits
from fusco import Capacity, ExpertPlacement, Settings, Topology
from fusco.cuda.failure import stall_of
from fusco.cuda.kernels import exchange_rows as kernel
from fusco.cuda.memory.layout import DeviceLayout
from generator import any_bits

pytestmark = pytest.mark.skipif(not is_available, reason="needs a C++ compiler, g++ or clang++")
KINDS = [(torch.uint8, ()), (torch.bfloat16, (33,)), (torch.float32, (4,))]


@pytest.fixture(autouse=True)
def _many_chunks(monkeypatch):
    """Several channels with small chunks: more of them than slots, and than warps of some ranks."""
    monkeypatch.setattr(kernel, "_LEAST_CHUNK_BYTES", 16)
    monkeypatch.setattr(kernel, "NUM_THREADS", 64)


def run(num_ranks: int, program, folder, order: int, timeout_s: float = 30.0, patience: int = 1) -> list[Any]:
    capacity = Capacity(max_tokens_per_rank=1, max_bytes_per_token=8, num_topk=1)
    settings = Settings(timeout_s=timeout_s, slice_bytes=128, ring_depth=3)
    layout = DeviceLayout(Topology((0,) * num_ranks), capacity, settings)
    placement = ExpertPlacement.contiguous(num_ranks, num_ranks)
    return Emulated(folder, order, patience).world(layout, placement).run(program)


@pytest.mark.parametrize("num_ranks", [1, 2, 5])
def test_rows_arrive_in_order_of_rank(num_ranks, folder):
    for order, (dtype, shape) in enumerate(KINDS):
        num_rows = np.random.default_rng(order).integers(0, 40, (3, num_ranks, num_ranks))
        num_rows[0, :, -1] = 0  # a call in which a rank gets nothing

        def rows(call: int, src: int, dst: int, kind=(dtype, shape), num_rows=num_rows) -> torch.Tensor:
            return any_bits((int(num_rows[call, src, dst]), *kind[1]), kind[0], "rows", call, src, dst)

        def program(at: Rank, kind=(dtype, shape), num_rows=num_rows, rows=rows) -> list[torch.Tensor]:
            outputs = []
            for call, numbers in enumerate(num_rows):
                sent = torch.cat([rows(call, at.rank, dst) for dst in range(num_ranks)])
                output = any_bits((int(numbers[:, at.rank].sum()), *kind[1]), kind[0], "poison")
                ends = (sent, numbers[at.rank].tolist()), (output, numbers[:, at.rank].tolist())
                budget = [None, 1, 2][(call + at.rank) % 3]
                kernel.exchange_rows(at.context.launcher(at.stream), at.arena.layout, *ends, num_sms=budget)
                outputs.append((sent, output))
            at.machine_is_idle()
            return [output for _, output in outputs]

        for rank, outputs in enumerate(run(num_ranks, program, folder, order)):
            for call, output in enumerate(outputs):
                expected = torch.cat([rows(call, src, rank) for src in range(num_ranks)])
                assert_same_bits(output, expected, f"call {call} on rank {rank}")


def test_a_rank_that_does_not_come_is_named(folder):
    def program(at: Rank) -> Any:
        rows, output = torch.ones(6, 5), torch.zeros(6, 5)
        if at.rank != 1:
            ends = (rows, [2, 2, 2]), (output, [2, 2, 2])
            kernel.exchange_rows(at.context.launcher(at.stream), at.arena.layout, *ends)
            at.machine_is_idle()
        return at.arena

    found = run(3, program, folder, order=1, timeout_s=0.05, patience=1000)
    for arena in (found[0], found[2]):
        stall = stall_of(arena.failure, arena.node_ranks)
        assert (stall.phase, stall.on_ranks) == ("exchanging rows", (1,))
