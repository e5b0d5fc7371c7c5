"""Functions on ranks: bytes moved and memory used as a communicator reports them, and the expected values."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from rank_setup import Setup, law_of

import fusco
from fusco.bench.explain import plan_cost


@dataclass(frozen=True)
class Bytes:
    """Sums over a rank's cases: rows and metadata between nodes, and rows within nodes, as measured and as planned."""

    dispatched: int
    combined: int
    metadata: int
    planned: int
    intranode: int
    planned_intranode: int
    internode_rows: int  # of all ranks: distinct (token, remote node) pairs


def count_bytes(
    group: dist.ProcessGroup, setup: Setup, kinds: list[str], hidden: int, num_topk: int | None = None
) -> Bytes:
    """Dispatch and combine bfloat16 rows of each kind of routing."""
    totals = dict.fromkeys(Bytes.__dataclass_fields__, 0)
    with setup.open(group) as comm:
        for seed, kind in enumerate(kinds):
            case = setup.case(kind, seed, comm.topology.world_size, num_topk)
            x = torch.zeros(case.num_tokens(comm.rank), hidden, dtype=torch.bfloat16)
            dispatched = comm.dispatch(x, case.topk_idx(comm.rank), case.topk_weights(comm.rank))
            cost = plan_cost(dispatched.handle.plan, 2 * hidden)
            totals["planned"] += cost.internode_send_bytes
            totals["planned_intranode"] += cost.intranode_bytes
            totals["dispatched"] += comm.profile.internode_row_bytes
            totals["intranode"] += comm.profile.intranode_row_bytes
            totals["metadata"] += comm.profile.internode_metadata_bytes
            comm.combine(dispatched.rows, dispatched.handle)
            totals["combined"] += comm.profile.internode_row_bytes
            assert comm.profile.rearranging_s == 0.0
            totals["internode_rows"] += law_of(comm, case).num_internode_rows(comm.topology.rank_to_node)
    return Bytes(**totals)


def memory_taken(group: dist.ProcessGroup, setup: Setup) -> tuple[int, int, fusco.MemorySize]:
    """Shared and private bytes of a communicator, and the ``memory_size_hint`` for it."""
    capacity = fusco.Capacity(
        max_tokens_per_rank=setup.max_tokens, max_bytes_per_token=setup.max_bytes_per_token, num_topk=setup.num_topk
    )
    with setup.open(group) as comm:
        hint = fusco.memory_size_hint(comm.topology, capacity, setup.settings)
        engine = comm._engine
        return len(engine._memory.bytes[engine._memory.local]), engine._private.nbytes, hint
