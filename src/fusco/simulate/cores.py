"""What the cores of a machine do where they move the rows, as on the CPU: work that its ranks share."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fusco.simulate.demand import Demand
from fusco.simulate.flows import Hop, Program
from fusco.simulate.forwarding import Call, expert_rows


def with_cores(program: Program, demand: Demand, call: Call, *, has_pool: bool) -> Program:
    """Add what fusco's ranks do with each row, at the same time as the network carries others.

    Each byte that a rank sends to another node counts once, and so does each of the experts' rows, and in a combine of
    the sums by rank. With ``has_pool`` a dispatch begins with a pass over a rank's own tokens, to where its node reads
    them, and a combine ends with one, which adds the sums of all nodes.
    """
    size, ranks = demand.bytes_per_row, np.arange(demand.topology.world_size)
    work = expert_rows(demand) * size
    for hop in program.hops:
        if hop.kind == "between":
            work = work + np.bincount(hop.src, hop.num_bytes, len(ranks)).astype(np.int64)
    if call == "combine" and has_pool:
        work = work + demand.rank_rows.sum(axis=0) * size
    hops = [*program.hops, Hop(name="move rows", kind="cores", src=ranks, dst=ranks, num_bytes=work)]
    last, own = len(hops), demand.num_tokens * size
    if has_pool and call == "combine":
        after = tuple(range(last))
        hops.append(Hop(name="add sums of nodes", kind="memory", src=ranks, dst=ranks, num_bytes=own, after=after))
    elif has_pool:
        hops = [hop if hop.after else replace(hop, after=(last,)) for hop in hops]
        hops.append(Hop(name="copy own rows", kind="memory", src=ranks, dst=ranks, num_bytes=own))
    return replace(program, hops=tuple(hops))
