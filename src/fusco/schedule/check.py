"""Checker for any schedule: it delivers every byte once and keeps the busiest node busy."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from fusco.core.lanes import IntArray
from fusco.schedule.few import budget_bytes
from fusco.schedule.schedule import Schedule
from fusco.schedule.stages import Stages, Transfers, lower_bound_bytes


def check_schedule(schedule: Schedule) -> None:
    """Raise ``ValueError`` with the first ten faults unless the schedule is valid.

    In a valid schedule, every byte of every message is delivered once, by ranks that have it by then. Each node has one
    partner in each stage. Every lane carries its share. The busiest node is never idle (in ``"few"``, at most 2 % of
    the time).
    """
    faults = list(find_faults(schedule))
    if faults:
        more = f" and {len(faults) - 10} more" if len(faults) > 10 else ""
        raise ValueError("not a valid schedule: " + "; ".join(faults[:10]) + more)


def find_faults(schedule: Schedule) -> Iterator[str]:
    """Yield one sentence for each fault of a schedule; none if it is valid."""
    node_bytes = _node_bytes(schedule)
    yield from _stage_faults(schedule.stages, node_bytes)
    yield from _idle_faults(schedule, node_bytes)
    yield from _place_faults(schedule)
    yield from _lane_faults(schedule)
    yield from _byte_faults(schedule)


def _node_bytes(schedule: Schedule) -> IntArray:
    node_to_ranks = np.array(schedule.topology.node_to_ranks)
    tiles = schedule.rank_bytes[node_to_ranks[:, None, :, None], node_to_ranks[None, :, None, :]]
    node_bytes: IntArray = tiles.sum(axis=(2, 3))
    np.fill_diagonal(node_bytes, 0)
    return node_bytes


def _stage_faults(stages: Stages, node_bytes: IntArray) -> Iterator[str]:
    """Check that each node has one partner, none sends beyond the stage, and stages sum to the node-to-node matrix."""
    num_nodes = len(node_bytes)
    if stages.dst_node.shape != stages.num_bytes.shape or stages.dst_node.shape != (stages.num_stages, num_nodes):
        yield f"stages have shapes {stages.dst_node.shape} and {stages.num_bytes.shape} for {num_nodes} nodes"
        return
    for stage in range(stages.num_stages):
        dst_node, num_bytes = stages.dst_node[stage], stages.num_bytes[stage]
        sends = dst_node >= 0
        receivers, count = np.unique(dst_node[sends], return_counts=True)
        for node in receivers[count > 1]:
            yield f"node {node} receives from several nodes in stage {stage}"
        for node in np.flatnonzero(sends & (dst_node == np.arange(num_nodes))):
            yield f"node {node} sends to itself in stage {stage}"
        for node in np.flatnonzero((num_bytes > 0) != sends):
            yield f"node {node} sends {num_bytes[node]} bytes to node {dst_node[node]} in stage {stage}"
        for node in np.flatnonzero(num_bytes > stages.duration_bytes[stage]):
            length = stages.duration_bytes[stage]
            yield f"node {node} sends {num_bytes[node]} bytes in stage {stage}, which has {length}"
    if stages.dst_node.max(initial=-1) >= num_nodes or stages.dst_node.min(initial=-1) < -1:
        yield f"stages name nodes that are none of the {num_nodes}"
        return
    sent = stages.node_bytes()
    for src, dst in np.argwhere(sent != node_bytes):
        yield f"stages send {sent[src, dst]} of {node_bytes[src, dst]} bytes from node {src} to node {dst}"


def _idle_faults(schedule: Schedule, node_bytes: IntArray) -> Iterator[str]:
    bound, total = lower_bound_bytes(node_bytes), schedule.stages.total_bytes
    if schedule.mode == "few" and total > budget_bytes(bound):
        yield f"the busiest node waits: {total} bytes of stages for {bound}, more than 2 % longer"
    if schedule.mode == "exact" and total != bound:
        yield f"the busiest node waits: {total} bytes of stages for {bound}"


def _place_faults(schedule: Schedule) -> Iterator[str]:
    """Check that transfers within nodes stay there, and that others follow their stage, at the same local rank."""
    to_node, to_local = np.array(schedule.topology.rank_to_node), np.array(schedule.topology.rank_to_local)
    for name in ("local", "balancing", "redistribution"):
        transfers: Transfers = getattr(schedule, name)
        for i in np.flatnonzero(to_node[transfers.from_rank] != to_node[transfers.to_rank]):
            yield f"{name} leaves the node, from rank {transfers.from_rank[i]} to rank {transfers.to_rank[i]}"
    internode, stages = schedule.internode, schedule.stages
    if internode.stage.min(initial=0) < 0 or internode.stage.max(initial=-1) >= stages.num_stages:
        yield f"a transfer between nodes names stages that are none of the {stages.num_stages}"
        return
    planned = stages.dst_node[internode.stage, to_node[internode.from_rank]]
    is_wrong = (to_local[internode.from_rank] != to_local[internode.to_rank]) | (planned != to_node[internode.to_rank])
    for i in np.flatnonzero(is_wrong):
        ends = f"from rank {internode.from_rank[i]} to rank {internode.to_rank[i]}"
        yield f"a transfer between nodes goes {ends} in stage {internode.stage[i]}, whose node is {planned[i]}"


def _lane_faults(schedule: Schedule) -> Iterator[str]:
    """Check that in every stage the links of a node carry shares that differ by one byte at most."""
    stages, topology, internode = schedule.stages, schedule.topology, schedule.internode
    if internode.stage.min(initial=0) < 0 or internode.stage.max(initial=-1) >= stages.num_stages:
        return
    carried = np.zeros((stages.num_stages, topology.world_size), np.int64)
    np.add.at(carried, (internode.stage, internode.from_rank), internode.num_bytes)
    carried = carried[:, np.array(topology.node_to_ranks)]
    for stage, node in np.argwhere(carried.sum(axis=2) != stages.num_bytes):
        total, planned = carried[stage, node].sum(), stages.num_bytes[stage, node]
        yield f"ranks of node {node} send {total} bytes in stage {stage}, which plans {planned}"
    links = np.array(schedule.lane_links)
    least = carried.sum(axis=2, keepdims=True) // links.sum() * links
    for stage, node in np.argwhere(((carried < least) | (carried > least + links)).any(axis=2)):
        yield f"ranks of node {node} send {carried[stage, node].tolist()} bytes in stage {stage}"


def _byte_faults(schedule: Schedule) -> Iterator[str]:
    """Follow every byte: senders have what they send, and each byte arrives at its destination once."""
    to_node = np.array(schedule.topology.rank_to_node)
    is_local = to_node[:, None] == to_node
    local, balancing, internode = schedule.local, schedule.balancing, schedule.internode
    redistribution = schedule.redistribution
    for name, bad in (
        ("local", (local.from_rank != local.src_rank) | (local.to_rank != local.dst_rank)),
        ("balancing", balancing.from_rank != balancing.src_rank),
        ("redistribution", redistribution.to_rank != redistribution.dst_rank),
    ):
        if bad.any():
            yield f"{name} number {np.flatnonzero(bad)[0]} does not connect its message's ends"
    yield from _differ("local", _runs(local), "the messages within nodes", _messages(schedule.rank_bytes * is_local))
    between = _messages(schedule.rank_bytes * ~is_local)
    yield from _differ("internode", _runs(internode), "the messages between nodes", between)
    balanced_out = internode.select(internode.from_rank != internode.src_rank)
    balanced = _runs(balancing, holder=balancing.to_rank)
    yield from _differ(
        "balancing", balanced, "what lanes carry for others", _runs(balanced_out, balanced_out.from_rank)
    )
    to_redistribute = internode.select(internode.to_rank != internode.dst_rank)
    expected = _runs(to_redistribute, to_redistribute.to_rank, to_redistribute.stage)
    redistributed = _runs(redistribution, redistribution.from_rank, redistribution.stage)
    yield from _differ("redistribution", redistributed, "what arrives for others", expected)


def _messages(rank_bytes: IntArray) -> IntArray:
    src, dst = np.nonzero(rank_bytes)
    nothing = np.zeros(len(src), np.int64)
    return np.stack([src, dst, nothing, nothing, nothing, rank_bytes[src, dst]], axis=1)


def _runs(transfers: Transfers, holder: IntArray | None = None, stage: IntArray | None = None) -> IntArray:
    """Return rows of (src, dst, holder, stage, first byte, end); adjacent pieces are joined, not overlapping ones."""
    nothing = np.zeros(len(transfers), np.int64)
    first, end = transfers.first_byte, transfers.first_byte + transfers.num_bytes
    keys = [transfers.src_rank, transfers.dst_rank, nothing if holder is None else holder]
    keys.append(nothing if stage is None else stage)
    table = np.stack([*keys, first, end], axis=1)
    table = table[np.lexsort((end, first, keys[3], keys[2], keys[1], keys[0]))]
    joins = np.all(table[1:, :4] == table[:-1, :4], axis=1) & (table[1:, 4] == table[:-1, 5])
    starts, ends = np.append(True, ~joins)[: len(table)], np.append(~joins, True)[: len(table)]
    return np.concatenate([table[starts, :5], table[ends, 5:]], axis=1)


def _differ(name: str, found: IntArray, what: str, expected: IntArray) -> Iterator[str]:
    found_runs, expected_runs = set(map(tuple, found.tolist())), set(map(tuple, expected.tolist()))
    for src, dst, _, _, first, end in sorted(found_runs - expected_runs):
        yield f"{name} has bytes {first} to {end} of rank {src}'s message to rank {dst}, not in {what}"
    for src, dst, _, _, first, end in sorted(expected_runs - found_runs):
        yield f"{name} lacks bytes {first} to {end} of that from {src} to {dst} in {what}"
    if found_runs == expected_runs and len(found) != len(expected):
        yield f"{name} has {len(found)} runs of bytes, some of them twice, for {len(expected)} in {what}"
