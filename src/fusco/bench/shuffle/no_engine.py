"""fusco without its engine (FUSCO section 5.4): the same plan, by torch.distributed and explicit rearranging.

Every pass over memory that the engine fuses into the transfer is a separate step here. A dispatch packs one copy of a
token for each node that needs it (``index_select``), sends these to the forwarders that the balancer chose (``isend``
and ``irecv``), rearranges them by rank of the node (``index_select``), exchanges within the node
(``all_to_all_single``), and permutes to expert-major order (``index_select``). A combine is the mirror, with sums in
float32 at each rank, at the forwarder, and at the token's rank.

Without its planner (the same section), each rank that needs a token is sent a separate copy: ``expand``.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from fusco.bench.harness.links import exchange_messages
from fusco.core.placement import ExpertPlacement
from fusco.core.profile import CallProfile
from fusco.core.topology import Topology
from fusco.planner.balancer import Balancer
from fusco.planner.dispatch_plan import mark_destinations
from fusco.planner.rank_lanes import RankLanes
from fusco.planner.routing import Routing
from fusco.planner.traffic import Traffic


@dataclass(frozen=True)
class InternodeBlocks:
    """Blocks of rows that this rank sends to forwarders on other nodes, and that it receives as a forwarder."""

    tokens: torch.Tensor  # int64, the tokens to send, block by block
    sends: list[tuple[int, int]]  # (forwarder, number of rows) for each block
    receives: list[tuple[int, int]]  # (source rank, number of rows) for each block

    @property
    def num_received(self) -> int:
        """Rows that this rank forwards for other ranks."""
        return sum(num for _, num in self.receives)


@dataclass(frozen=True)
class Fanout:
    """Copies of the rows that a rank holds (received ones, then local ones) for the ranks of its node."""

    copy_to_row: torch.Tensor  # int64 (num_copies,), which row each copy is of, by destination
    received_counts: list[int]  # for each rank of the node, copies of received rows; those of local rows follow them
    send_counts: list[int]  # copies for each rank of the group; none for other nodes
    receive_counts: list[int]  # copies from each


@dataclass(frozen=True)
class SortedPairs:
    """Pairs (row that arrived, local expert of it), in order of row and k."""

    to_row: torch.Tensor  # int64 (num_pairs,)
    to_slot: torch.Tensor  # int64 (num_pairs,), row of the expert-major output
    weights: torch.Tensor  # float32 (num_pairs,)
    num_rows_per_expert: torch.Tensor  # int64 (num_local_experts,)


@dataclass(frozen=True)
class NoEngineHandle:
    """State of a dispatch that combine needs; a pair is a row that arrived and one of its local experts."""

    blocks: InternodeBlocks
    fanout: Fanout
    num_tokens: int
    num_arrived: int
    pair_to_arrived: torch.Tensor
    pair_to_slot: torch.Tensor
    pair_weights: torch.Tensor


class NoEngineShuffle:
    """Dispatch and combine by fusco's plan with the operations of torch.distributed, on any device."""

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
        """Return expert-major rows as ``Communicator.dispatch`` does, the rows of each local expert, and a handle."""
        self.profile = CallProfile("no-engine dispatch")
        num_topk = topk_idx.shape[1]
        with self.profile.spend("planning"):
            blocks = self._plan_blocks(topk_idx)
            # As they travel: the ids and weights of each token side by side, int32 (num_tokens, 2 * num_topk).
            routing = torch.cat([topk_idx.int(), topk_weights.float().view(torch.int32)], dim=1)
            forwarded = routing.new_empty(blocks.num_received, routing.shape[1])
            self._exchange_blocks(blocks, routing.index_select(0, blocks.tokens), forwarded)
            self.profile.internode_metadata_bytes += routing[0:1].nbytes * len(blocks.tokens)
            held = torch.cat([forwarded, routing])
            fanout = self._plan_fanout(held[:, :num_topk], blocks.num_received)
            # A row's source follows its routing: the receiver sorts by it, into the order that is specified.
            described = torch.cat([held, self._sources(blocks, len(x), held.device)[:, None]], dim=1)
            copies = described.index_select(0, fanout.copy_to_row)
            arrived = self._all_to_all(copies, fanout.send_counts, fanout.receive_counts)
            by_source = arrived[:, -1].argsort(stable=True)
            pairs = self._sort_pairs(arrived[by_source], num_topk)
            slot_to_arrived = torch.empty_like(pairs.to_slot)
            slot_to_arrived[pairs.to_slot] = by_source[pairs.to_row]
        with self.profile.spend("rearranging"):
            packed = x.index_select(0, blocks.tokens)
        with self.profile.spend("wire"):
            received = x.new_empty(blocks.num_received, *x.shape[1:])
            self._exchange_blocks(blocks, packed, received)
            self.profile.internode_row_bytes = packed.nbytes
        with self.profile.spend("rearranging"):
            copies = self._select_held(received, x, fanout)
        with self.profile.spend("wire"):
            rows = self._all_to_all(copies, fanout.send_counts, fanout.receive_counts)
        with self.profile.spend("rearranging"):
            expert_major = rows.index_select(0, slot_to_arrived)
        handle = NoEngineHandle(
            blocks, fanout, len(x), len(rows), by_source[pairs.to_row], pairs.to_slot, pairs.weights
        )
        return expert_major, pairs.num_rows_per_expert.tolist(), handle

    def combine(self, y: torch.Tensor, handle: NoEngineHandle) -> torch.Tensor:
        """Return token-major rows, weighted and summed in float32; partial sums travel in the dtype of ``y``."""
        self.profile = CallProfile("no-engine combine")
        blocks, fanout = handle.blocks, handle.fanout
        with self.profile.spend("rearranging"):
            terms = _widened(y.index_select(0, handle.pair_to_slot)).mul_(handle.pair_weights[:, None])
            part_of_rank = _sum_rows(handle.num_arrived, handle.pair_to_arrived, terms).to(y.dtype)
        with self.profile.spend("wire"):
            copies = self._all_to_all(part_of_rank, fanout.receive_counts, fanout.send_counts)
        with self.profile.spend("rearranging"):
            num_held = blocks.num_received + handle.num_tokens
            part_of_node = _sum_rows(num_held, fanout.copy_to_row, _widened(copies))
            to_send = part_of_node[: blocks.num_received].to(y.dtype)
        with self.profile.spend("wire"):
            returned = y.new_empty(len(blocks.tokens), *y.shape[1:])
            back = InternodeBlocks(blocks.tokens, blocks.receives, blocks.sends)
            self._exchange_blocks(back, to_send, returned)
            self.profile.internode_row_bytes = to_send.nbytes
        with self.profile.spend("rearranging"):
            out = part_of_node[blocks.num_received :].index_add_(0, blocks.tokens, _widened(returned))
            return out.to(y.dtype)

    def _plan_blocks(self, topk_idx: torch.Tensor) -> InternodeBlocks:
        """Gather the counts of all ranks, run the balancer on them as fusco does, and return this rank's blocks."""
        topology, placement = self._topology, self._placement
        expert_to_node = placement.membership_table(topology.rank_to_node, topk_idx.device)
        is_for_node = mark_destinations(topk_idx, expert_to_node, topology.num_nodes)
        counts_here = is_for_node.sum(0)
        gathered = counts_here.new_empty(topology.world_size, topology.num_nodes)
        dist.all_gather(list(gathered.unbind(0)), counts_here, group=self._group)
        counts: list[list[int]] = gathered.tolist()
        num_remote_ranks = topology.world_size - len(self._node_ranks)
        self.profile.internode_metadata_bytes = counts_here.nbytes * num_remote_ranks
        traffic, remote = Traffic.from_counts(topology, counts), topology.remote_nodes(self._rank)
        lanes = RankLanes(self._rank, traffic.lanes_of(self._balancer(traffic)))
        assert not lanes.lanes.num_moved, "a balancer of groups"
        return InternodeBlocks(
            tokens=is_for_node[:, list(remote)].T.nonzero()[:, 1],
            sends=list(zip(lanes.own.forwarder.tolist(), lanes.own.num_rows.tolist(), strict=True)),
            receives=sorted(zip(lanes.received.src.tolist(), lanes.received.num_rows.tolist(), strict=True)),
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

    def _sources(self, blocks: InternodeBlocks, num_tokens: int, device: torch.device) -> torch.Tensor:
        """Return the rank that each held row comes from, int32."""
        held = [*blocks.receives, (self._rank, num_tokens)]
        sources = torch.tensor([src for src, _ in held], dtype=torch.int32, device=device)
        return sources.repeat_interleave(torch.tensor([num for _, num in held], device=device))

    def _sort_pairs(self, routing: torch.Tensor, num_topk: int) -> SortedPairs:
        """Sort the pairs of the rows that arrived, which are in order of source and token, by expert."""
        ids, weights = routing[:, :num_topk], routing[:, num_topk : 2 * num_topk].contiguous().view(torch.float32)
        local_expert = self._placement.local_index_table(self._rank, ids.device)[ids.long()]
        row, k = (local_expert >= 0).nonzero(as_tuple=True)
        expert = local_expert[row, k]
        num_rows = torch.bincount(expert, minlength=len(self._placement.rank_to_experts[self._rank]))
        return SortedPairs(row, expert.argsort(stable=True).argsort(), weights[row, k], num_rows)

    def _select_held(self, received: torch.Tensor, local: torch.Tensor, fanout: Fanout) -> torch.Tensor:
        """Return copies of held rows, without first concatenating received and local ones."""
        copies = local.new_empty(len(fanout.copy_to_row), *local.shape[1:])
        first = 0
        for rank, num_received in zip(self._node_ranks, fanout.received_counts, strict=True):
            middle, end = first + num_received, first + fanout.send_counts[rank]
            torch.index_select(received, 0, fanout.copy_to_row[first:middle], out=copies[first:middle])
            torch.index_select(local, 0, fanout.copy_to_row[middle:end] - len(received), out=copies[middle:end])
            first = end
        return copies

    def _exchange_blocks(self, blocks: InternodeBlocks, to_send: torch.Tensor, received: torch.Tensor) -> None:
        exchange_messages(self._group, _split(blocks.sends, to_send), _split(blocks.receives, received))

    def _all_to_all(self, rows: torch.Tensor, send_counts: list[int], receive_counts: list[int]) -> torch.Tensor:
        if len(self._node_ranks) == 1:
            return rows
        arrived = rows.new_empty(sum(receive_counts), *rows.shape[1:])
        dist.all_to_all_single(arrived, rows, receive_counts, send_counts, group=self._group)
        self.profile.intranode_row_bytes += (sum(send_counts) - send_counts[self._rank]) * rows[0:1].nbytes
        return arrived


def _split(blocks: Sequence[tuple[int, int]], rows: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
    """Return each rank's part of rows that are stored block by block."""
    ends = itertools.accumulate(num for _, num in blocks)
    return [(rank, rows[end - num : end]) for (rank, num), end in zip(blocks, ends, strict=True)]


def _widened(rows: torch.Tensor) -> torch.Tensor:
    return rows.to(torch.promote_types(rows.dtype, torch.float32))


def _sum_rows(num_rows: int, term_to_row: torch.Tensor, terms: torch.Tensor) -> torch.Tensor:
    return terms.new_zeros(num_rows, *terms.shape[1:]).index_add_(0, term_to_row, terms)


@dataclass(frozen=True)
class Expanded:
    """A routing in which each (token, rank that needs it) is a separate token, with that rank's experts only."""

    routing: Routing  # of the copies
    copy_to_token: torch.Tensor  # int64 (num_copies,), ascending; by rank among the copies of a token


def expand(routing: Routing, placement: ExpertPlacement) -> Expanded:
    """Make a token of each (token, rank); rows arrive in the same order, since each expert still gets a token once.

    >>> placement = ExpertPlacement.contiguous(num_experts=4, world_size=2)
    >>> expanded = expand(Routing(torch.tensor([[0, 3], [-1, -1], [2, 3]])), placement)
    >>> expanded.copy_to_token.tolist(), expanded.routing.topk_idx.tolist()
    ([0, 0, 2], [[0, -1], [-1, 3], [2, 3]])
    """
    ids = routing.topk_idx
    expert_to_rank = placement.membership_table(range(placement.world_size), ids.device)
    tokens, ranks = mark_destinations(ids, expert_to_rank, placement.world_size).nonzero(as_tuple=True)
    is_there = expert_to_rank[ids[tokens].long()] == ranks[:, None]
    weights = None if routing.topk_weights is None else routing.topk_weights[tokens]
    return Expanded(Routing(torch.where(is_there, ids[tokens], -1), weights), tokens)


def sum_copies(parts: torch.Tensor, copy_to_token: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Return token-major rows: the sums of each token's copies, added in float32."""
    wide = torch.promote_types(parts.dtype, torch.float32)
    out = torch.zeros(num_tokens, *parts.shape[1:], dtype=wide, device=parts.device)
    return out.index_add_(0, copy_to_token, parts.to(wide)).to(parts.dtype)
