"""The kernel ``copy_experts`` on the emulator: copies, and sums of gradients, are those of the host, bit for bit."""

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
from fusco.control.fingerprint import CollectiveFingerprint
from fusco.core.rows import accumulation_dtype
from fusco.cuda.failure import stall_of
from fusco.cuda.kernels import copy_experts as kernel
from fusco.cuda.kernels.plan_batch import DeviceBatches
from fusco.cuda.memory.layout import DeviceLayout
from fusco.placement import Balance, plan_batch
from generator import any_bits, values

pytestmark = pytest.mark.skipif(not is_available, reason="needs a C++ compiler, g++ or clang++")
CPU = torch.device("cpu")
KINDS = [(torch.float32, (3, 11)), (torch.uint8, (7,)), (torch.bfloat16, (40, 4)), (torch.float64, ())]


@pytest.fixture(autouse=True)
def _many_messages(monkeypatch):
    """Small chunks of few channels: more messages than slots."""
    for name, value in (("CHUNK_BYTES", 32), ("MAX_BLOCKS", 2), ("NUM_THREADS", 64)):
        monkeypatch.setattr(kernel, name, value)


class Batch:
    """A plan of a placement, with empty places at the end, on the host and as the device has it."""

    def __init__(self, num_ranks: int, num_experts: int, spare_places: int, seed: int) -> None:
        homes = np.random.default_rng(seed).permutation(num_experts) % num_ranks
        placement = ExpertPlacement.explicit(homes.tolist(), num_ranks)
        self.placement = placement.in_places(num_experts // num_ranks + spare_places)
        rows = np.random.default_rng(seed).integers(0, 9, num_experts)
        rows[: num_ranks // 2] += 60
        balance = Balance(spare_places, tolerance=0.0)
        self.plan = plan_batch(rows, homes, num_ranks, balance)
        copies = np.stack([self.plan.experts, self.plan.ranks, self.plan.rows], axis=1).ravel()
        self.table = torch.from_numpy(np.concatenate([[len(self.plan.experts), 1], rows, copies])).int()
        self.batches = DeviceBatches.of(self.placement, balance, CPU)
        self.homes, self.num_ranks, self.spare_places = homes, num_ranks, spare_places

    def experts(self, rank: int) -> list[int]:
        return [expert for expert in self.placement.physical_to_logical[rank] if expert >= 0]

    def copies(self, rank: int) -> list[int]:
        return self.plan.experts[self.plan.ranks == rank].tolist()

    def run(self, program, folder, order: int, timeout_s: float = 30.0, patience: int = 1) -> list[Any]:
        capacity = Capacity(max_tokens_per_rank=1, max_bytes_per_token=8, num_topk=1)
        layout = DeviceLayout(Topology((0,) * self.num_ranks), capacity, Settings(timeout_s=timeout_s))
        return Emulated(folder, order, patience).world(layout, self.placement.physical).run(program)

    def launch(self, at: Rank, sources, targets, **options: bool) -> None:
        launcher = at.context.launcher(at.stream)
        args = (launcher, self.batches, self.table, at.context.copies_offset, sources, targets)
        kernel.copy_experts(*args, **options)


@pytest.mark.parametrize(("num_ranks", "num_experts", "spare_places"), [(1, 2, 1), (2, 4, 1), (5, 10, 3)], ids=str)
def test_copies_are_those_of_the_plan(num_ranks, num_experts, spare_places, folder):
    for order in range(2):
        batch = Batch(num_ranks, num_experts, spare_places, seed=order)
        assert len(batch.plan.experts) > 0 or num_ranks == 1

        def expert(number: int, i: int, call: int) -> torch.Tensor:
            dtype, shape = KINDS[i]
            return any_bits((1, *shape), dtype, "expert", number, i, call)[0]

        def program(at: Rank, batch=batch, expert=expert) -> list[list[torch.Tensor]]:
            calls = []
            for call in range(3):
                mine = batch.experts(at.rank)
                weights = [torch.stack([expert(number, i, call) for number in mine]) for i in range(len(KINDS))]
                spares = [any_bits((batch.spare_places, *shape), dtype) for dtype, shape in KINDS]
                batch.launch(at, weights, spares)
                calls.append((weights, spares))
            at.machine_is_idle()
            return [spares for _, spares in calls]

        for rank, calls in enumerate(batch.run(program, folder, order)):
            copied = batch.copies(rank)
            for call, spares in enumerate(calls):
                for i, spare in enumerate(spares):
                    for place, number in enumerate(copied):
                        assert_same_bits(spare[place], expert(number, i, call), f"copy {number} on rank {rank}")
                    assert not spare[len(copied) :].any(), "places that are left are zero"


@pytest.mark.parametrize(
    ("num_ranks", "spare_places", "dtypes"),
    [(2, 1, (torch.bfloat16, torch.bfloat16, torch.float64)), (5, 3, (torch.float32,))],
    ids=str,
)
def test_gradients_are_added_in_ascending_order_of_rank(num_ranks, spare_places, dtypes, folder):
    for order in range(3):
        batch = Batch(num_ranks, 2 * num_ranks, spare_places, seed=order)
        shapes = [(5, 7), (3,), (40, 2)]

        def gradients(rank: int, batch=batch, shapes=shapes) -> list[torch.Tensor]:
            sizes = [((batch.spare_places, *shape), dtype) for dtype, shape in zip(dtypes, shapes, strict=False)]
            return [values(shape, dtype, "gradient", rank, i) for i, (shape, dtype) in enumerate(sizes)]

        def program(at: Rank, batch=batch, gradients=gradients) -> list[torch.Tensor]:
            grads = gradients(at.rank)
            sums = [torch.zeros((2, *each.shape[1:]), dtype=accumulation_dtype(each.dtype)) for each in grads]
            batch.launch(at, grads, sums, is_sum=True)
            at.machine_is_idle()
            return sums

        for home, sums in enumerate(batch.run(program, folder, order)):
            expected = [torch.zeros_like(each) for each in sums]
            for rank in range(num_ranks):
                for place, number in enumerate(batch.copies(rank)):
                    if batch.homes[number] == home:
                        for total, grad in zip(expected, gradients(rank), strict=True):
                            total[batch.experts(home).index(number)].add_(grad[place])
            for found, wanted in zip(sums, expected, strict=True):
                assert_same_bits(found, wanted, f"sums of rank {home}")


def test_a_rank_that_does_not_come_is_named_and_leaves_no_copies(folder):
    batch = Batch(3, 6, 1, seed=0)
    absent = int(batch.homes[batch.plan.experts[0]])
    waiting = [rank for rank in range(3) if rank != absent and any(batch.homes[batch.copies(rank)] == absent)]
    assert waiting, "a rank gets an expert of the absent one"

    def program(at: Rank) -> Any:
        spares = torch.zeros(1, 50)
        if at.rank != absent:
            batch.launch(at, [torch.ones(2, 50)], [spares])
            at.machine_is_idle()
        return at.arena, spares

    found = batch.run(program, folder, order=1, timeout_s=0.05, patience=1000)
    for arena, spares in (found[rank] for rank in waiting):
        assert (spares.view(torch.uint8) == 0xFF).all()
        stall = stall_of(arena.failure, arena.node_ranks)
        assert (stall.phase, stall.on_ranks) == ("copying experts", (absent,))


def test_without_an_absent_home_places_are_zero_and_other_copies_are_right(folder):
    """Replays of a graph that was captured before a rank was lost leave no weights of an earlier replay in a place."""
    found_before_others = 0
    for seed in range(3):
        batch = Batch(4, 8, 2, seed)
        homes = [[int(batch.homes[number]) for number in batch.copies(rank)] for rank in range(4)]
        absent = next((row[0] for row in homes if len(set(row)) > 1), homes[int(batch.plan.ranks[0])][0])

        def program(at: Rank, batch=batch, absent=absent) -> torch.Tensor:
            spares = torch.full((2, 50), 7.0)
            if at.rank != absent:
                at.arena.begin_again(1 << absent)
            at.session.agree(CollectiveFingerprint("all have begun again"))
            if at.rank != absent:
                weights = torch.tensor(batch.experts(at.rank)).float()[:, None].expand(-1, 50).contiguous() + 1
                batch.launch(at, [weights], [spares])
                at.machine_is_idle()
            return spares

        for rank, spares in enumerate(batch.run(program, folder, order=seed)):
            if rank != absent:
                copied = batch.copies(rank)
                values_of = [0 if batch.homes[number] == absent else number + 1 for number in copied]
                found_before_others += values_of[:1] == [0] and any(values_of)
                assert spares[:, 0].tolist() == values_of + [0] * (2 - len(copied))
                assert (spares == spares[:, :1]).all()
    assert found_before_others, "a copy follows one whose home is absent"
