"""Dispatch plan with what the compiled loops of the CPU read."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from fusco.core.config import StaticRows
from fusco.core.errors import RowOverflowError
from fusco.cpu.kernels.plan_pairs import PlannedPairs
from fusco.planner.dispatch_plan import DispatchPlan, ExpertDistribution, NodeForwarding, select_tokens

# Messages of the busiest rank, and most of them in the memory of one. With 13 MB for each rank and 62.5 MB/s, slices of
# 1 MiB took 1.27 of the bound for a dispatch, of 256 KiB 1.18 (docs/performance/network.md).
_SLICES_PER_RANK, _MAX_SLICES_PER_SLOT = 32, 4


@dataclass(frozen=True, kw_only=True)
class CpuPlan(DispatchPlan):
    """See ``DispatchPlan``; ``pairs`` has its distribution, and more."""

    pairs: PlannedPairs
    is_attached: bool = False  # True if rows came with records, so that a rank holds those of its counterparts

    def rows_per_slice(self, rows_per_slot: int) -> int:
        """Return the rows of a message between nodes: those of a ring slot, or fewer so that the busiest rank has many.

        All flows of a rank end together, but for a slice of each (``in_proportion``).
        """
        if not (busiest := self.lanes.most_rows):
            return rows_per_slot  # within a node: fewer are more steps. 64 rows took 0.62 ms, in quarters 0.70
        least = rows_per_slot // _MAX_SLICES_PER_SLOT
        return max(1, least, min(busiest // _SLICES_PER_RANK, rows_per_slot))

    @cached_property
    def src_to_forwarding(self) -> dict[int, NodeForwarding]:
        """The forwarding of this rank, and of those whose rows it carries."""
        first = self.routing.src_to_first_row
        return {self.rank: self.forwarding} | {
            src: select_tokens(self.routing.topk_idx[first[src] : first[src + 1]], self.placement, self.topology)
            for src in set(self.rank_lanes.carried.src.tolist()) - {self.rank}
        }

    @cached_property
    def held_rows(self) -> npt.NDArray[np.int64]:
        """Rows in the pools of the node, by runs: int64 (num_runs, 4), in the order in which combine sums them.

        Each is the local rank that holds them, the rank that their sums go to, the first row and their end. Rows of
        other nodes are first, since their sums need the network.
        """
        topology, runs = self.topology, self.rank_lanes.incoming
        first_row, ranks = np.array(self.routing.src_to_first_row), np.array(topology.node_to_ranks[self.node])
        locals_, num_runs = np.array(topology.rank_to_local), len(runs.src)
        held = np.empty((num_runs + len(ranks), 4), np.int64)
        incoming, own = held[:num_runs], held[num_runs:]
        incoming[:, 0], incoming[:, 1] = locals_[runs.forwarder], runs.carrier
        incoming[:, 2] = first_row[runs.src] + runs.first
        incoming[:, 3] = incoming[:, 2] + runs.num_rows
        own[:, 0], own[:, 1], own[:, 2], own[:, 3] = locals_[ranks], ranks, first_row[ranks], first_row[ranks + 1]
        return held[np.argsort(held[:, 0], kind="stable")]


def overflow_of(pairs: ExpertDistribution, static: StaticRows | None, rank: int) -> RowOverflowError | None:
    """Return the error of an output that is too small, unless it is exact or rows may be dropped."""
    if static is None or static.on_overflow == "drop" or pairs.num_slots_needed <= static.limit:
        return None
    local_expert = None
    if static.rows_per_expert:
        wanted = (pairs.num_rows_per_expert + pairs.num_dropped_per_expert).tolist()
        local_expert = wanted.index(max(wanted))
    return RowOverflowError(rank, static.limit, pairs.num_slots_needed, local_expert=local_expert)
