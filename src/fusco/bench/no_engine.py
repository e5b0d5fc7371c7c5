"""fusco without its engine (FUSCO section 5.4): the same plan, by torch.distributed and explicit rearranging.

Every pass over memory that the engine fuses into the transfer stands here on its own. A dispatch packs one copy of a
token for each node that wants it (``index_select``), sends these to the forwarders that the balancer chose (``isend``
and ``irecv``), rearranges them by rank of the node (``index_select``), exchanges within the node
(``all_to_all_single``), and permutes to expert-major order (``index_select``). A combine is the mirror, with sums in
float32 at each rank, at the forwarder, and at home.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from fusco.bench.messages import exchange_messages
from fusco.core.groups import Groups
from fusco.core.placement import ExpertPlacement
from fusco.core.profile import CallProfile
from fusco.core.topology import Topology
from fusco.planner.balancer import Balancer, Traffic
from fusco.planner.distribution import ExpertDistribution, NodeRouting, distribute
from fusco.planner.forwarding import mark_destinations, plan_forwarding
from fusco.planner.internode import Forwarders


@dataclass(frozen=True)
class Crossing:
    """What this rank sends to forwarders on other nodes, and what it receives as one; blocks are (rank, rows)."""

    tokens: torch.Tensor  # int64, tokens to send, block by block
    to_send: list[tuple[int, int]]
    to_receive: list[tuple[int, int]]

    @property
    def num_received(self) -> int:
        """Rows that this rank holds for other ranks."""
        return sum(num for _, num in self.to_receive)


@dataclass(frozen=True)
class Fanout:
    """How the rows that a rank holds, received ones and then its own, go to the ranks of its node.

    Attributes:
        copy_to_row: int64 (num_copies,), which row each copy is of, by destination.
        received_counts: for each rank of the node, copies of received rows; those of own rows stand behind them.
        send_counts: copies for each rank of the group; none for other nodes.
        receive_counts: copies from each.

    """

    copy_to_row: torch.Tensor
    received_counts: list[int]
    send_counts: list[int]
    receive_counts: list[int]


@dataclass(frozen=True)
class NoEngineHandle:
    """What the way back needs; a pair is a row that arrived and one of its experts here."""

    crossing: Crossing
    fanout: Fanout
    num_tokens: int
    num_arrived: int
    pair_to_arrived: torch.Tensor
    pair_to_slot: torch.Tensor
    pair_weights: torch.Tensor


class NoEngineShuffle:
    """Dispatch and combine along fusco's plan with what torch.distributed has, on any device."""

    def __init__(
        self, group: dist.ProcessGroup, placement: ExpertPlacement, topology: Topology, balancer: Balancer
    ) -> None:
        self._group, self._placement, self._topology, self._balancer = group, placement, topology, balancer
        self._rank = dist.get_rank(group)
        self._node = topology.rank_to_node[self._rank]
        self._node_ranks = topology.node_to_ranks[self._node]
        self.profile = CallProfile()

    def dispatch(
        self, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor
    ) -> tuple[torch.Tensor, list[int], NoEngineHandle]:
        """Expert-major rows as ``Communicator.dispatch`` gives them, rows of each local expert, and a handle."""
        self.profile = CallProfile("no-engine dispatch")
        num_topk = topk_idx.shape[1]
        with self.profile.spend("planning"):
            crossing = self._plan_crossing(topk_idx)
            routing = _pack_routing(topk_idx, topk_weights)
            forwarded = routing.new_empty(crossing.num_received, routing.shape[1])
            self._cross(crossing, routing.index_select(0, crossing.tokens), forwarded)
            self.profile.internode_metadata_bytes += routing[0:1].nbytes * len(crossing.tokens)
            held = torch.cat([forwarded, routing])
            fanout = self._plan_fanout(held[:, :num_topk], crossing.num_received)
            # Behind a row's routing comes its source, by which the receiver restores the order of the law.
            described = torch.cat([held, self._sources(crossing, len(x), held.device)[:, None]], dim=1)
            arrived = self._exchange(described.index_select(0, fanout.copy_to_row), fanout)
            by_source = arrived[:, -1].argsort(stable=True)
            distribution, weights = self._distribute(arrived[by_source], num_topk)
            slot_to_arrived = torch.empty_like(distribution.pair_to_slot)
            slot_to_arrived[distribution.pair_to_slot] = by_source[distribution.pair_to_row]
        with self.profile.spend("rearranging"):
            packed = x.index_select(0, crossing.tokens)
        with self.profile.spend("wire"):
            received = x.new_empty(crossing.num_received, *x.shape[1:])
            self._cross(crossing, packed, received)
            self.profile.internode_row_bytes = packed.nbytes
        with self.profile.spend("rearranging"):
            copies = self._select_held(received, x, fanout)
        with self.profile.spend("wire"):
            rows = self._exchange(copies, fanout)
        with self.profile.spend("rearranging"):
            expert_major = rows.index_select(0, slot_to_arrived)
        handle = NoEngineHandle(
            crossing,
            fanout,
            len(x),
            len(rows),
            by_source[distribution.pair_to_row],
            distribution.pair_to_slot,
            weights[distribution.pair_to_row, distribution.pair_to_k],
        )
        return expert_major, distribution.num_rows_per_expert.tolist(), handle

    def combine(self, y: torch.Tensor, handle: NoEngineHandle) -> torch.Tensor:
        """Token-major rows, summed with their weights in float32; parts of sums travel in the dtype of ``y``."""
        self.profile = CallProfile("no-engine combine")
        crossing, fanout = handle.crossing, handle.fanout
        with self.profile.spend("rearranging"):
            terms = _widened(y.index_select(0, handle.pair_to_slot)).mul_(handle.pair_weights[:, None])
            part_of_rank = _sum_rows(handle.num_arrived, handle.pair_to_arrived, terms).to(y.dtype)
        with self.profile.spend("wire"):
            copies = self._exchange_back(part_of_rank, fanout)
        with self.profile.spend("rearranging"):
            num_held = crossing.num_received + handle.num_tokens
            part_of_node = _sum_rows(num_held, fanout.copy_to_row, _widened(copies))
            to_send = part_of_node[: crossing.num_received].to(y.dtype)
        with self.profile.spend("wire"):
            came_home = y.new_empty(len(crossing.tokens), *y.shape[1:])
            back = Crossing(crossing.tokens, crossing.to_receive, crossing.to_send)
            self._cross(back, to_send, came_home)
            self.profile.internode_row_bytes = to_send.nbytes
        with self.profile.spend("rearranging"):
            out = part_of_node[crossing.num_received :].index_add_(0, crossing.tokens, _widened(came_home))
            return out.to(y.dtype)

    def _plan_crossing(self, topk_idx: torch.Tensor) -> Crossing:
        """Who sends how many rows to whom: counts of all ranks, then the balancer, as in fusco."""
        topology, placement = self._topology, self._placement
        forwarding = plan_forwarding(topk_idx, placement, topology)
        own = torch.tensor(forwarding.num_tokens_to_node, device=topk_idx.device)
        gathered = own.new_empty(topology.world_size, topology.num_nodes)
        dist.all_gather(list(gathered.unbind(0)), own, group=self._group)
        counts: list[list[int]] = gathered.tolist()
        num_remote_ranks = topology.world_size - len(self._node_ranks)
        self.profile.internode_metadata_bytes = own.nbytes * num_remote_ranks
        groups: Groups = self._balancer(Traffic.from_counts(topology, counts))
        forwarders, remote = Forwarders(self._rank, groups), topology.remote_nodes(self._rank)
        return Crossing(
            tokens=torch.cat([forwarding.node_to_tokens[node] for node in remote] or [topk_idx.new_empty(0).long()]),
            to_send=[(forwarder, counts[self._rank][node]) for node, forwarder in sorted(forwarders.destinations)],
            to_receive=[(src, counts[src][self._node]) for src in sorted(forwarders.sources)],
        )

    def _plan_fanout(self, held_ids: torch.Tensor, num_received: int) -> Fanout:
        locals_of_node = [
            local if rank in self._node_ranks else -1 for rank, local in enumerate(self._topology.rank_to_local)
        ]
        expert_to_local = self._placement.membership_table(locals_of_node, held_ids.device)
        marks = mark_destinations(held_ids, expert_to_local, len(self._node_ranks))
        sent = marks.sum(0)
        arriving = torch.empty_like(sent)
        one_each = self._by_rank([1] * len(self._node_ranks))
        dist.all_to_all_single(arriving, sent, one_each, one_each, group=self._group)
        return Fanout(
            copy_to_row=marks.T.nonzero()[:, 1].contiguous(),
            received_counts=marks[:num_received].sum(0).tolist(),
            send_counts=self._by_rank(sent.tolist()),
            receive_counts=self._by_rank(arriving.tolist()),
        )

    def _by_rank(self, local_to_count: Sequence[int]) -> list[int]:
        counts = [0] * self._topology.world_size
        for rank, count in zip(self._node_ranks, local_to_count, strict=True):
            counts[rank] = count
        return counts

    def _sources(self, crossing: Crossing, num_tokens: int, device: torch.device) -> torch.Tensor:
        """The rank that each held row comes from, int32."""
        blocks = [*crossing.to_receive, (self._rank, num_tokens)]
        sources = torch.tensor([src for src, _ in blocks], dtype=torch.int32, device=device)
        return sources.repeat_interleave(torch.tensor([num for _, num in blocks], device=device))

    def _distribute(self, routing: torch.Tensor, num_topk: int) -> tuple[ExpertDistribution, torch.Tensor]:
        """Slots of the rows that arrived, and their weights; rows stand in order of source and token."""
        ids, weights = routing[:, :num_topk], _weights_of(routing, num_topk)
        node_routing = NodeRouting(ids, weights, (0, len(ids)))
        return distribute(node_routing, self._placement, self._rank), weights

    def _select_held(self, received: torch.Tensor, own: torch.Tensor, fanout: Fanout) -> torch.Tensor:
        """Copies of held rows, without putting received ones and own ones into one place first."""
        copies = own.new_empty(len(fanout.copy_to_row), *own.shape[1:])
        first = 0
        for rank, num_received in zip(self._node_ranks, fanout.received_counts, strict=True):
            middle, end = first + num_received, first + fanout.send_counts[rank]
            torch.index_select(received, 0, fanout.copy_to_row[first:middle], out=copies[first:middle])
            torch.index_select(own, 0, fanout.copy_to_row[middle:end] - len(received), out=copies[middle:end])
            first = end
        return copies

    def _cross(self, crossing: Crossing, to_send: torch.Tensor, received: torch.Tensor) -> None:
        exchange_messages(self._group, _blocks(crossing.to_send, to_send), _blocks(crossing.to_receive, received))

    def _exchange(self, copies: torch.Tensor, fanout: Fanout) -> torch.Tensor:
        return self._all_to_all(copies, fanout.send_counts, fanout.receive_counts)

    def _exchange_back(self, parts: torch.Tensor, fanout: Fanout) -> torch.Tensor:
        return self._all_to_all(parts, fanout.receive_counts, fanout.send_counts)

    def _all_to_all(self, rows: torch.Tensor, send_counts: list[int], receive_counts: list[int]) -> torch.Tensor:
        if len(self._node_ranks) == 1:
            return rows
        arrived = rows.new_empty(sum(receive_counts), *rows.shape[1:])
        dist.all_to_all_single(arrived, rows, receive_counts, send_counts, group=self._group)
        self.profile.intranode_row_bytes += (sum(send_counts) - send_counts[self._rank]) * rows[0:1].nbytes
        return arrived


def _blocks(ranks: Sequence[tuple[int, int]], rows: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
    """The part of each rank, of rows that stand block by block."""
    ends = itertools.accumulate(num for _, num in ranks)
    return [(rank, rows[end - num : end]) for (rank, num), end in zip(ranks, ends, strict=True)]


def _pack_routing(topk_idx: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
    """Ids and weights of each token side by side, int32 (num_tokens, 2 * num_topk), as they travel."""
    return torch.cat([topk_idx.int(), topk_weights.float().view(torch.int32)], dim=1)


def _weights_of(routing: torch.Tensor, num_topk: int) -> torch.Tensor:
    return routing[:, num_topk : 2 * num_topk].contiguous().view(torch.float32)


def _widened(rows: torch.Tensor) -> torch.Tensor:
    return rows.to(torch.promote_types(rows.dtype, torch.float32))


def _sum_rows(num_rows: int, term_to_row: torch.Tensor, terms: torch.Tensor) -> torch.Tensor:
    return terms.new_zeros(num_rows, *terms.shape[1:]).index_add_(0, term_to_row, terms)
