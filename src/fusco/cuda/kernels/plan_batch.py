"""The kernel ``plan_batch``: the copies of a batch, from the rows of all ranks for each expert, and their owners.

One block. For 64 ranks, 256 experts and two spare places it reads 64 KiB of counts, keeps 58 KiB in shared memory, and
writes 5 KiB. Each of about 45 copies takes a warp three reductions, together about 450 cycles; the ways to hold a cap
run side by side. So about 20 us are expected where the aim can be held, and 12 more for each further cap. With counts
and quotas, for 2 ranks and 128 experts, two H200 took 48 to 57 us (docs/balance.md).
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
import torch

from fusco.core.balance import FIRST_GAP, MOST_TRIES, NUM_CAPS, NUM_RULES, NUM_TRIES, PRECISION, Balance, BatchPlan
from fusco.core.lanes import IntArray
from fusco.core.placement import ExpertPlacement
from fusco.cuda.kernels.abi import I32, POINTER, WARP_SIZE, pinned, struct
from fusco.cuda.kernels.choose_owners import DeviceOwnerTables
from fusco.cuda.kernels.comm import ABSENT_RANKS
from fusco.cuda.kernels.launcher import Launcher
from fusco.cuda.tuning import PLAN_BATCH_WARPS

_COPY_INTS = 3  # expert, rank, rows
_HEADER_INTS = 2  # number of copies, and whether the aim could be held
_STATIC_BYTES = 512  # of shared memory, at most, beside what the launch gives
_OWNERS = "expert_to_first owners owner_to_rank quotas expert_to_divided divided"

# ``BatchArgs`` of plan_batch.cu.
BatchArgs = struct(
    "BatchArgs",
    (POINTER, f"counts order first homes empty_places tried header rows_per_expert copies {_OWNERS} absent"),
    (ctypes.c_double, "aim_over_mean rows_per_copy"),
    (I32, "num_ranks num_experts places_per_rank spare_places ranks_per_node max_divided"),
)
BATCH_CONSTANTS = {
    "NUM_CAPS": NUM_CAPS,
    "NUM_RULES": NUM_RULES,
    "MOST_TRIES": MOST_TRIES,
    "NUM_TRIES": NUM_TRIES,
    "PRECISION": PRECISION,
    "FIRST_GAP": FIRST_GAP,
}


@dataclass(eq=False)
class DeviceBatches:
    """Batches of one placement, each expert in one place, for ``plan_batch``; tables are int32 on the device.

    Attributes:
        placement, balance: what they are planned for.
        homes: int64 (E,) on the host, the rank of each expert.
        order: (E,), experts by home; those of rank r are ``[first[r], first[r + 1])``.
        places: (E,), the physical expert of each.
        empty_places: (R, spare places), physical experts.
        tried: (ways, C, 3), scratch; C copies at most.
    """

    placement: ExpertPlacement
    balance: Balance
    homes: IntArray
    order: torch.Tensor
    first: torch.Tensor
    places: torch.Tensor
    empty_places: torch.Tensor
    tried: torch.Tensor

    @classmethod
    def of(cls, placement: ExpertPlacement, balance: Balance, device: torch.device) -> DeviceBatches:
        """Return the tables of a placement that has the spare places."""

        def on_device(table: IntArray) -> torch.Tensor:
            values = torch.from_numpy(np.ascontiguousarray(table, np.int32))
            return pinned(values, device).to(device, non_blocking=True)

        num_ranks, spare = placement.world_size, balance.spare_places
        homes = np.array(placement.expert_to_rank)
        order = np.argsort(homes, kind="stable")
        experts = np.array(placement.physical_to_logical)
        empty = np.argsort(experts >= 0, axis=1, kind="stable")[:, :spare]
        sizes = (NUM_RULES + MOST_TRIES, num_ranks * spare, _COPY_INTS)
        return cls(
            placement=placement,
            balance=balance,
            homes=homes,
            order=on_device(order),
            first=on_device(np.searchsorted(homes[order], np.arange(num_ranks + 1))),
            places=on_device(np.array([places[0] for places in placement.expert_to_physical])),
            empty_places=on_device(empty + np.arange(num_ranks)[:, None] * experts.shape[1]),
            tried=torch.zeros(sizes, dtype=torch.int32, device=device),
        )

    def replan(self, placement: ExpertPlacement) -> None:
        """Take the tables of another placement of as many experts and ranks, in order of the stream."""
        other = DeviceBatches.of(placement, self.balance, self.order.device)
        for name in ("order", "first", "places", "empty_places"):
            getattr(self, name).copy_(getattr(other, name))
        self.placement, self.homes = placement, other.homes

    def plan_of(self, result: torch.Tensor) -> BatchPlan:
        """Return the plan of a result that has been copied to the host."""
        (num_copies, is_aim_held), num_experts = result[:_HEADER_INTS].tolist(), len(self.homes)
        integers = result[_HEADER_INTS:].numpy().astype(np.int64)
        rows, copies = integers[:num_experts], integers[num_experts:].reshape(-1, _COPY_INTS)[:num_copies]
        sizes = (len(self.first) - 1, self.balance)
        return BatchPlan.of_copies(rows, self.homes, *sizes, copies, is_aim_held=bool(is_aim_held))


def plan_batch(
    launcher: Launcher, batches: DeviceBatches, tables: DeviceOwnerTables, ranks_per_node: int
) -> torch.Tensor:
    """Plan a batch from the counts of ``tables``; write into ``tables`` the owners and their quotas.

    See ``fusco.placement.plan_batch``: the plan is the same, bit for bit.

    Returns:
        The plan, int32: number of copies, whether the aim could be held, rows of each expert (E,), copies (C, 3).
    """
    num_ranks, num_experts = tables.counts.shape
    balance, num_copies = batches.balance, batches.tried.shape[1]
    common_ints, warp_ints = num_experts + num_ranks, num_experts + 3 * num_ranks
    limit = launcher.library.max_shared_bytes - _STATIC_BYTES
    num_warps = min(PLAN_BATCH_WARPS, (limit // 4 - common_ints) // warp_ints)
    shared_bytes = 4 * max(common_ints + num_warps * warp_ints, (_COPY_INTS + 1) * num_copies)
    if num_warps < 1 or shared_bytes > limit:
        raise ValueError(
            f"a plan for {num_experts} experts on {num_ranks} ranks with {balance.spare_places} spare places needs "
            f"{shared_bytes:,} bytes of shared memory, but a block has {limit:,}"
        )
    made = tables.counts.new_empty(_HEADER_INTS + num_experts + num_copies * _COPY_INTS)
    result = made.data_ptr()
    arguments = BatchArgs(
        counts=tables.counts.data_ptr(),
        order=batches.order.data_ptr(),
        first=batches.first.data_ptr(),
        homes=batches.places.data_ptr(),
        empty_places=batches.empty_places.data_ptr(),
        tried=batches.tried.data_ptr(),
        header=result,
        rows_per_expert=result + 4 * _HEADER_INTS,
        copies=result + 4 * (_HEADER_INTS + num_experts),
        **{name: getattr(tables, name).data_ptr() for name in _OWNERS.split()},
        absent=launcher.comm.state + 4 * ABSENT_RANKS,
        aim_over_mean=1 + balance.tolerance,
        rows_per_copy=balance.rows_per_copy,
        num_ranks=num_ranks,
        num_experts=num_experts,
        places_per_rank=len(tables.owners) // num_ranks,
        spare_places=balance.spare_places,
        ranks_per_node=ranks_per_node,
        max_divided=tables.max_divided,
    )
    num_threads = num_warps * WARP_SIZE
    launcher.launch(
        "plan_batch", BATCH_CONSTANTS, arguments, grid=1, num_threads=num_threads, shared_bytes=shared_bytes
    )
    return made
