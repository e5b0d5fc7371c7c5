"""Choose the owner of each row on a rank, in one pass; see ``fusco.planner.owners``."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from fusco.core.compiled import compiled
from fusco.core.lanes import IntArray
from fusco.planner.owners import Int32Array, OwnerTables
from fusco.planner.routing import UNPLACED

_NO_BOUNDS = np.zeros(0, np.int32)


def choose_owners(topk_idx: torch.Tensor, tables: OwnerTables, bounds: Int32Array | None = None) -> torch.Tensor:
    """Return the physical expert of each pair, contiguous (T, K) of the dtype of ``topk_idx``, -1 for none.

    An invalid id stays invalid: ``fusco.planner.routing.logical_id`` returns it.

    Args:
        topk_idx: int32 or int64 (T, K) on the CPU, the caller's ids.
        tables: of this rank.
        bounds: of ``OwnerTables.divide_rows``, int32 (C,), if there are shares.

    >>> from fusco.core.placement import ExpertPlacement
    >>> from fusco.core.topology import Topology
    >>> placement = ExpertPlacement.replicated([[0, 1], [1, 2], [3, 1]])
    >>> tables = OwnerTables.of(placement, 1, Topology.of_equal_nodes(3, 3))
    >>> choose_owners(torch.tensor([[1, 0], [-1, 3], [2, 1]]), tables).tolist()
    [[2, 0], [-1, 4], [3, 2]]
    """
    ids = topk_idx.contiguous()
    chosen = torch.empty_like(ids)
    num_chosen = np.zeros(len(tables.divided), np.int64)
    sizes = (tables.num_experts, tables.num_physical, tables.rank)
    arrays = (tables.expert_to_first, tables.owners, tables.expert_to_divided)
    flat = (ids.view(-1).numpy(), chosen.view(-1).numpy())
    _choose(*flat, *arrays, _NO_BOUNDS if bounds is None else bounds, sizes, num_chosen)
    return chosen


def count_experts(topk_idx: torch.Tensor, num_experts: int) -> IntArray:
    """Return the pairs of each expert, int64 (E,)."""
    counts = np.zeros(num_experts, np.int64)
    _count(topk_idx.contiguous().view(-1).numpy(), counts)
    return counts


@compiled(nogil=True)
def _choose(
    ids: Any,
    chosen: Any,
    expert_to_first: Any,
    owners: Any,
    expert_to_divided: Any,
    bounds: Any,
    sizes: Any,
    num_chosen: Any,
) -> None:
    num_experts, num_physical, rank = sizes
    for pair in range(len(ids)):
        expert = ids[pair]
        if not 0 <= expert < num_experts:
            chosen[pair] = expert + UNPLACED if num_experts <= expert < num_physical else expert
            continue
        first = owner = expert_to_first[expert]
        divided = expert_to_divided[expert]
        if divided >= 0:
            i = num_chosen[divided]
            num_chosen[divided] += 1
            if len(bounds):
                while bounds[owner] <= i and owner + 1 < expert_to_first[expert + 1]:
                    owner += 1
            else:
                owner = first + (i + rank) % (expert_to_first[expert + 1] - first)
        chosen[pair] = owners[owner] if owner < expert_to_first[expert + 1] else -1  # none of an expert that is lost


@compiled(nogil=True)
def _count(ids: Any, counts: Any) -> None:
    for expert in ids:
        if 0 <= expert < len(counts):
            counts[expert] += 1


def warm_up_owner_choice(dtype: torch.dtype, tables: OwnerTables) -> None:
    """Compile both for a dtype of ids, or read them from the disk cache."""
    ids = torch.zeros(0, 1, dtype=dtype, device="cpu")
    choose_owners(ids, tables)
    count_experts(ids, tables.num_experts)
