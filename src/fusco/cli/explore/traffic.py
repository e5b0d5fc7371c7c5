"""Views of one dispatch: rows before and after deduplication, loads of links, copies avoided, work of ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fusco.cli.explore.views import BalancerLoads, Bar, CopiesView, ExpertsView, LinksView, MatrixView
from fusco.cli.wording import amount, percent, plural, ratio
from fusco.core.balance import Balance
from fusco.core.lanes import IntArray
from fusco.core.placement import ExpertPlacement
from fusco.core.topology import Topology
from fusco.placement import plan_batch
from fusco.planner.balancer import BALANCERS
from fusco.planner.dispatch_plan import select_tokens
from fusco.planner.traffic import Traffic

MAX_CELLS = 256  # of a side of a matrix: with more ranks cells are nodes, with more nodes several nodes
_MAX_RANK_CELLS = 1 << 18  # rows of each rank for each node, in the page once before and once after deduplication
_EVEN = 1.1  # the busiest over the mean, below which a title calls traffic even


@dataclass(frozen=True, eq=False)
class Dispatch:
    """Rows of one dispatch between nodes.

    Attributes:
        traffic: rows of one copy for each node.
        copies: rows of a copy for each expert by source rank and destination rank, int64 (R, R), or, with more than
            ``MAX_CELLS`` ranks, destination node, (R, N). Entries within a node are 0.
        tokens: tokens of all ranks.
        bytes_per_row: bytes of a row.
    """

    traffic: Traffic
    copies: IntArray
    tokens: int
    bytes_per_row: int

    @classmethod
    def of_routings(
        cls, topk_idx: Iterable[torch.Tensor], placement: ExpertPlacement, topology: Topology, bytes_per_row: int
    ) -> Dispatch:
        """Count the rows of every rank; ``topk_idx`` has the expert ids of each, (tokens, topk), -1 for none.

        >>> topology = Topology.of_equal_nodes(world_size=4, ranks_per_node=2)
        >>> ids = [torch.tensor([[4, 6], [0, 4]])] + 3 * [torch.zeros((0, 2), dtype=torch.int64)]
        >>> made = Dispatch.of_routings(ids, ExpertPlacement.contiguous(8, 4), topology, bytes_per_row=2)
        >>> made.copies[0].tolist(), made.traffic.rows_by_rank[0].tolist()
        ([0, 0, 2, 1], [0, 2])
        """
        nodes, owners = np.array(topology.rank_to_node), np.array(placement.expert_to_rank)
        of_ranks = topology.world_size <= MAX_CELLS
        expert_to_cell = owners if of_ranks else nodes[owners]
        cell_to_node = nodes if of_ranks else np.arange(topology.num_nodes)
        counts, copies, tokens = [], np.zeros((topology.world_size, len(cell_to_node)), np.int64), 0
        for rank, ids in enumerate(topk_idx):
            counts.append(select_tokens(ids, placement, topology).num_tokens_to_node)
            named = ids.numpy()[ids.numpy() >= 0]
            of_rank = np.bincount(expert_to_cell[named], minlength=len(cell_to_node))
            copies[rank] = np.where(cell_to_node != nodes[rank], of_rank, 0)
            tokens += len(ids)
        return cls(Traffic.from_counts(topology, counts), copies, tokens, bytes_per_row)

    @property
    def topology(self) -> Topology:
        """Nodes of the ranks."""
        return self.traffic.topology

    @property
    def node_rows(self) -> IntArray:
        """Rows from node to node, one copy for each, int64 (N, N)."""
        return self.traffic.num_rows.sum(axis=1)


def copies_view(dispatch: Dispatch) -> CopiesView:
    """Return what one copy for each node saves. fusco sends what the bound says: distinct (token, node) pairs."""
    sent = int(dispatch.node_rows.sum())
    return copies_of(int(dispatch.copies.sum()), sent, sent, dispatch.tokens, dispatch.bytes_per_row)


def copies_of(needed: int, sent: int, bound: int, tokens: int, bytes_per_row: int) -> CopiesView:
    """Return the view of rows between nodes: a copy for each expert, those sent, and the bound."""
    saved = (needed - sent) / needed if needed else 0.0
    size = amount((needed - sent) * bytes_per_row)
    title = f"One copy per node, not per expert, takes {percent(saved)} off the network: {size} a dispatch"
    return CopiesView(
        anchor="copies",
        question="Which copies are avoided?",
        title=title if needed > sent else "Nothing is deduplicated: as many rows are sent as there are pairs",
        reading="Rows between nodes in one dispatch. A token with several experts on a node crosses to it once; the "
        "rank that receives it hands it on within the node.",
        bars=[
            Bar(label="a copy for each expert", rows=needed),
            Bar(label="sent", rows=sent),
            Bar(label="bound: a copy for each node", rows=bound),
        ],
        tokens=tokens,
        bytes_per_row=bytes_per_row,
    )


def matrix_view(dispatch: Dispatch, balancer: str) -> MatrixView:
    """Return who sends how much to whom: ranks up to ``MAX_CELLS``, then nodes, then several nodes a cell."""
    topology, traffic = dispatch.topology, dispatch.traffic
    title = hottest(dispatch.node_rows)
    if topology.world_size > MAX_CELLS:
        of_ranks = (dispatch.copies, traffic.rows_by_rank)
        before, after = (_sum_blocks(rows, topology.ranks_per_node, 0) for rows in of_ranks)
        return node_matrix(before, after, topology.ranks_per_node, dispatch.bytes_per_row, of_ranks)
    return MatrixView(
        **_about_matrix(title, "ranks"),
        cell="rank",
        nodes_per_cell=1,
        ranks_per_node=topology.ranks_per_node,
        bytes_per_row=dispatch.bytes_per_row,
        before=dispatch.copies.tolist(),
        after=traffic.lanes_of(BALANCERS[balancer](traffic)).rank_to_rank.tolist(),
    )


def node_matrix(
    before: IntArray,
    after: IntArray,
    ranks_per_node: int,
    bytes_per_row: int,
    of_ranks: tuple[IntArray, IntArray] | None = None,
) -> MatrixView:
    """Return the matrix of nodes, or of blocks of nodes if there are many; the arguments are rows, int64 (N, N).

    ``of_ranks`` has the rows of each rank, before and after, int64 (R, N), for the ranks of a node.
    """
    title, nodes_per_cell = hottest(after), -(-len(before) // MAX_CELLS)
    ranks: list[list[list[int]]] = [[], []]
    if of_ranks and nodes_per_cell == 1 and of_ranks[0].size <= _MAX_RANK_CELLS:
        ranks = [rows.tolist() for rows in of_ranks]
    blocks = [_sum_blocks(_sum_blocks(rows, nodes_per_cell, 0), nodes_per_cell, 1) for rows in (before, after)]
    return MatrixView(
        **_about_matrix(title, "nodes" if nodes_per_cell == 1 else f"blocks of {nodes_per_cell} nodes"),
        cell="node",
        nodes_per_cell=nodes_per_cell,
        ranks_per_node=ranks_per_node,
        bytes_per_row=bytes_per_row,
        before=blocks[0].tolist(),
        after=blocks[1].tolist(),
        ranks_before=ranks[0],
        ranks_after=ranks[1],
    )


def _about_matrix(title: str, cells: str) -> dict[str, Any]:
    reading = (
        f"Rows between {cells}: senders down, receivers across, totals at the edges, both on one scale. On the left a "
        "copy for each expert, on the right what the plan sends: one for each node."
    )
    return {"anchor": "traffic", "question": "Who is hot?", "title": title, "reading": reading}


def _sum_blocks(rows: IntArray, size: int, axis: int) -> IntArray:
    return np.add.reduceat(rows, np.arange(0, rows.shape[axis], size), axis=axis)


def hottest(rows: IntArray) -> str:
    """Return which node is busier than the mean, and by how much; ``rows`` (N, N) is without traffic within nodes.

    >>> hottest(np.array([[0, 30, 10], [10, 0, 10], [10, 10, 0]]))
    'Node 0 is hot: it sends 1.5 times what the mean node sends'
    """
    mean = rows.sum() / len(rows)
    if not mean:
        return "Nothing crosses between nodes"
    loads = np.stack([rows.sum(axis=1), rows.sum(axis=0)]) / mean
    way, node = divmod(int(loads.argmax()), len(rows))
    does, most = ("sends", "receives")[way], float(loads.max())
    if most < _EVEN:
        return f"Nodes are even: the busiest {does} {ratio(most)} times the mean"
    return f"Node {node} is hot: it {does} {ratio(most)} times what the mean node {does}"


def links_view(dispatch: Dispatch, balancer: str) -> LinksView:
    """Return the loads of all ranks' links with each balancer, ``balancer`` being the chosen one."""
    traffic, loads = dispatch.traffic, []
    for name, choose in BALANCERS.items():
        lanes = traffic.lanes_of(choose(traffic))
        ratios = [float(rows.max()) / (traffic.bound or 1.0) for rows in (lanes.sent_rows, lanes.received_rows)]
        loads.append(
            BalancerLoads(
                name=name,
                is_chosen=name == balancer,
                sends=lanes.sent_rows.tolist(),
                receives=lanes.received_rows.tolist(),
                over_bound=round(max(ratios), 4),
                send_ratio=round(ratios[0], 4),
                receive_ratio=round(ratios[1], 4),
                moved_rows=lanes.num_moved,
            )
        )
    return links_of(loads, traffic.bound, traffic.topology.ranks_per_node, dispatch.bytes_per_row)


def links_of(loads: list[BalancerLoads], bound_rows: float, ranks_per_node: int, bytes_per_row: int) -> LinksView:
    """Return the view of links, the busiest balancer first and the chosen one last."""
    loads = sorted(loads, key=lambda each: (each.is_chosen, -each.over_bound))
    return LinksView(
        anchor="links",
        question="Which link binds?",
        title=_busiest_link(loads),
        reading="What each rank's NIC sends (up) and receives (down), one balancer below the other. The line is the "
        "bound, the busiest node's share of a NIC. What exceeds it, the others wait for.",
        ranks_per_node=ranks_per_node,
        bytes_per_row=bytes_per_row,
        bound_rows=round(bound_rows, 1),
        balancers=loads,
    )


def _busiest_link(loads: list[BalancerLoads]) -> str:
    chosen, busiest = loads[-1], {each.name: each.over_bound for each in loads}
    before, after = busiest.get("static", chosen.over_bound), chosen.over_bound
    if not after:
        return "No link carries anything between nodes"
    if before - after < 0.01:
        static = f", {ratio(before)} with static groups" if chosen.name != "static" else ""
        return f"The busiest NIC carries {ratio(after)} of the bound with {chosen.name}{static}"
    verb = "bring" if chosen.name == "lanes" else "brings"
    name = chosen.name[0].upper() + chosen.name[1:]
    return f"{name} {verb} the busiest NIC from {ratio(before)} to {ratio(after)} of the bound"


def experts_view(
    rows: Sequence[IntArray],
    placement: ExpertPlacement,
    num_ranks: int,
    balance: Balance,
    layers: Sequence[int],
    ranks_per_node: int,
) -> ExpertsView:
    """Plan each layer; ``rows`` has the rows of all ranks for each expert, int64 (E,), of each of ``layers``."""
    homes = np.array(placement.expert_to_rank)
    plans = [plan_batch(of_layer, homes, num_ranks, balance, ranks_per_node) for of_layer in rows]
    before = [round(plan.busiest_over_mean_before, 4) for plan in plans]
    after = [round(plan.busiest_over_mean, 4) for plan in plans]
    return ExpertsView(
        **about_experts(before, after, layers, balance.spare_places),
        spare_places=balance.spare_places,
        layers=list(layers),
        before=[plan.loads_before.tolist() for plan in plans],
        after=[plan.loads.tolist() for plan in plans],
        ratio_before=before,
        ratio_after=after,
        copies=[len(plan.ranks) for plan in plans],
    )


def about_experts(
    before: Sequence[float], after: Sequence[float], layers: Sequence[int], spare_places: int
) -> dict[str, str]:
    """Return what ``View`` has, from the busiest rank over the mean in each layer, without and with copies."""
    reading = "Rows that each rank's experts compute, over the mean"
    if spare_places:
        places = plural(spare_places, "spare place")
        reading += f": without copies, then with copies of busy experts in {places} a rank, planned for the batch"
    title = _finding(before, after, layers, spare_places)
    return {"anchor": "experts", "question": "Is work even?", "title": title, "reading": f"{reading}."}


def _finding(before: Sequence[float], after: Sequence[float], layers: Sequence[int], spare_places: int) -> str:
    worst = int(np.argmax(before))
    start = f"In layer {layers[worst]} the busiest rank" if len(layers) > 1 else "The busiest rank"
    start += f" computes {ratio(before[worst])} times the mean"
    if not spare_places or before[worst] - max(after) < 0.01:
        return start
    every = "every layer" if len(layers) > 1 else "it"
    verb = "brings" if spare_places == 1 else "bring"
    return f"{start}; {plural(spare_places, 'spare place')} a rank {verb} {every} to {ratio(max(after))} at most"
