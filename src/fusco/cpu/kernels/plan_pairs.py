"""Plan one rank's pairs in two passes over the node's routing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from fusco.core.compiled import compiled
from fusco.core.config import StaticRows
from fusco.core.placement import ExpertPlacement
from fusco.planner.dispatch_plan import ExpertDistribution, NodeRouting


@dataclass(frozen=True)
class PlannedPairs:
    """Slots of one rank's pairs, and the ranks of the node that need each row."""

    distribution: ExpertDistribution  # see ``ExpertDistribution``
    # int64 (M + 1,); row ``i`` has pairs ``row_to_first_pair[i]`` to ``[i + 1]``
    row_to_first_pair: torch.Tensor
    row_to_locals: torch.Tensor  # True where a local rank needs a row by the routing, bool (M, L)


def plan_pairs(
    routing: NodeRouting,
    placement: ExpertPlacement,
    rank: int,
    rank_to_local: tuple[int, ...],
    expert_alignment: int = 1,
    static: StaticRows | None = None,
) -> PlannedPairs:
    """Assign each (row, k) whose expert is on ``rank`` its slot, and mark the local ranks that need each row.

    Blocks are in order of local expert, each rounded up to ``expert_alignment`` rows. Rows inside a block are in order
    of (source rank, token, k): a stable counting sort by expert, since the rows are already in that order. With
    ``static`` rows the output has a fixed size, and pairs with a slot beyond it are dropped; with ``rows_per_expert``
    the block of local expert ``e`` begins at slot ``e * rows_per_expert``. ``rank_to_local`` has the local ranks of the
    ranks of this node, -1 for others (``Topology.locals_of``).

    Rank 0 owns experts 0 and 1; source 0 has tokens ``[1, 0]`` and ``[1, 2]``, source 1 has ``[0, -1]``.

    >>> placement = ExpertPlacement.contiguous(num_experts=4, world_size=2)
    >>> routing = NodeRouting(torch.tensor([[1, 0], [1, 2], [0, -1]]), None, (0, 2, 3))
    >>> plan = plan_pairs(routing, placement, rank=0, rank_to_local=(0, 1)).distribution
    >>> plan.pair_to_row.tolist(), plan.pair_to_k.tolist(), plan.pair_to_slot.tolist()
    ([0, 0, 1, 2], [0, 1, 0, 0], [2, 0, 3, 1])
    >>> plan.num_rows_per_expert.tolist(), plan.block_to_first_slot, plan.block_to_end_slot
    ([2, 2], (0, 2), (2, 4))

    With one row for each expert, the second of either is dropped:

    >>> plan = plan_pairs(routing, placement, 0, (0, 1), static=StaticRows(rows_per_expert=1)).distribution
    >>> plan.pair_to_row.tolist(), plan.pair_to_slot.tolist(), plan.num_dropped_per_expert.tolist()
    ([0, 0], [1, 0], [1, 1])
    """
    device = routing.topk_idx.device
    num_experts, num_rows = len(placement.rank_to_experts[rank]), len(routing.topk_idx)
    tables = _Tables(
        placement.local_index_table(rank, device).numpy(),
        placement.membership_table(rank_to_local, device).numpy(),
        np.zeros(num_experts, np.int64),
        np.zeros(num_experts, np.int32),
        np.zeros(num_experts, np.int64),
        np.zeros(num_experts, np.int64),
        np.empty(num_rows + 1, np.int64),
        np.zeros((num_rows, max(rank_to_local) + 1), np.bool_),
    )
    rows_per_expert = static.rows_per_expert if static else None
    limits = (-1 if static is None else static.num_slots(num_experts), rows_per_expert or 0)
    num_pairs, num_needed = _count_rows(routing.topk_idx.numpy(), tables, expert_alignment, *limits)
    pairs = np.empty((3, num_pairs), np.int64)
    _assign_slots(routing.topk_idx.numpy(), tables, pairs)
    to_row, to_k, to_slot = torch.from_numpy(pairs)
    distribution = ExpertDistribution(
        to_row,
        to_k,
        to_slot,
        torch.from_numpy(tables.num_rows_per_expert),
        torch.from_numpy(tables.num_dropped_per_expert),
        tuple(tables.block_to_first_slot.tolist()),
        tuple(tables.block_to_end_slot.tolist()),
        num_needed,
        num_needed if static is None else limits[0],
        rows_per_expert,
    )
    return PlannedPairs(distribution, *map(torch.from_numpy, (tables.row_to_first_pair, tables.row_to_locals)))


class _Tables(NamedTuple):
    """Tables that the loops read, by expert id, or write."""

    expert_to_index: npt.NDArray[np.int64]
    expert_to_local: npt.NDArray[np.int64]
    num_rows_per_expert: npt.NDArray[np.int64]
    num_dropped_per_expert: npt.NDArray[np.int32]
    block_to_first_slot: npt.NDArray[np.int64]
    block_to_end_slot: npt.NDArray[np.int64]
    row_to_first_pair: npt.NDArray[np.int64]
    row_to_locals: npt.NDArray[np.bool_]


@compiled(nogil=True)
def _count_rows(topk_idx: Any, tables: Any, alignment: int, num_slots: int, rows_per_expert: int) -> Any:
    """Fill all tables but ``row_to_first_pair``; return the number of pairs kept and of slots needed.

    ``num_slots`` is -1 for as many as needed, ``rows_per_expert`` 0 for blocks that follow each other.
    """
    num_rows = tables.num_rows_per_expert
    for row in range(topk_idx.shape[0]):
        for k in range(topk_idx.shape[1]):
            expert = topk_idx[row, k]  # -1 is the last entry of the tables
            if tables.expert_to_local[expert] >= 0:
                tables.row_to_locals[row, tables.expert_to_local[expert]] = True
            if tables.expert_to_index[expert] >= 0:
                num_rows[tables.expert_to_index[expert]] += 1
    first, needed = 0, 0  # of the next block; slots, or rows of the expert with the most
    for expert in range(num_rows.size):
        wanted = num_rows[expert]
        padded = (wanted + alignment - 1) // alignment * alignment
        if rows_per_expert > 0:
            first, end, needed = expert * rows_per_expert, (expert + 1) * rows_per_expert, max(needed, wanted)
        else:
            needed = end = first + padded
            if num_slots >= 0:
                first, end = min(first, num_slots), min(end, num_slots)
        num_rows[expert] = min(wanted, end - first)
        tables.num_dropped_per_expert[expert] = wanted - num_rows[expert]
        tables.block_to_first_slot[expert] = first
        tables.block_to_end_slot[expert] = min(end, first + padded)
        first = needed
    return num_rows.sum(), needed


@compiled(nogil=True)
def _assign_slots(topk_idx: Any, tables: Any, pairs: Any) -> None:
    """Fill ``row_to_first_pair``, and row, k and slot of each pair that is kept."""
    num_assigned, num_pairs = np.zeros_like(tables.num_rows_per_expert), 0
    for row in range(topk_idx.shape[0]):
        tables.row_to_first_pair[row] = num_pairs
        for k in range(topk_idx.shape[1]):
            index = tables.expert_to_index[topk_idx[row, k]]
            # A block that the limit cuts has fewer rows; those of the blocks after it are all dropped.
            if index >= 0 and num_assigned[index] < tables.num_rows_per_expert[index]:
                slot = tables.block_to_first_slot[index] + num_assigned[index]
                pairs[0, num_pairs], pairs[1, num_pairs], pairs[2, num_pairs] = row, k, slot
                num_assigned[index] += 1
                num_pairs += 1
    tables.row_to_first_pair[-1] = num_pairs
