"""Order in which a rank sends its slices to other nodes, by the stages of a schedule.

In a stage every node sends to one node and receives from one, so no node receives from several at once (FAST section
4.2). Ranks do not wait for each other between stages. They only use the same order, each in proportion to its slices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fusco.core.lanes import IntArray, sums_before
from fusco.planner.traffic import Traffic
from fusco.schedule import decompose


def in_proportion(flow: IntArray) -> IntArray:
    """Return the order in which a rank sends its slices, so that all of its flows end together.

    Then each flow has that share of the rank's link that it has of its bytes, and wherever no link has more than the
    bound, none is idle while others are late (the allocation of Varys, SIGCOMM 2014, section 5.3). In turn, short flows
    would end early, and at the end one link would have what is left of all the long ones.

    ``flow`` is int64 (num_slices,), the flow of each slice; slices of a flow stay in order.

    >>> flow = np.array([7, 7, 7, 7, 5, 5, 6])
    >>> flow[in_proportion(flow)].tolist()
    [7, 5, 7, 6, 7, 5, 7]
    """
    ones = np.ones_like(flow)
    totals = np.bincount(flow, minlength=1)[flow]
    return np.argsort((sums_before(ones, flow) + 0.5) / totals, kind="stable")


@dataclass(frozen=True)
class SendingStage:
    """Stage in which the rank's node sends ``num_rows`` rows to node ``dst_node``."""

    dst_node: int
    num_rows: int


def plan_stages(traffic: Traffic, node: int) -> tuple[SendingStage, ...]:
    """Return the stages in which a node sends, in order. All ranks must pass the same traffic."""
    stages = decompose(traffic.num_rows.sum(axis=1), mode="few")
    partners, rows = stages.dst_node[:, node].tolist(), stages.num_bytes[:, node].tolist()
    return tuple(SendingStage(dst, num) for dst, num in zip(partners, rows, strict=True) if dst >= 0 and num > 0)


def warm_up_stages() -> None:
    """Compile ``plan_stages``, or load it from the disk cache."""
    decompose(np.ones((2, 2), np.int64), mode="few")


def order_of_slices(node_to_slices: Mapping[int, int], stages: Sequence[SendingStage]) -> list[int]:
    """Return the destination node of each slice that a rank sends, in order.

    A stage takes the same share of a rank's slices for a node as of its node's rows for that node.

    >>> order_of_slices({1: 4, 2: 2}, [SendingStage(1, 50), SendingStage(2, 30), SendingStage(1, 50)])
    [1, 1, 2, 2, 1, 1]
    """
    total, sent_rows = dict.fromkeys(node_to_slices, 0), dict.fromkeys(node_to_slices, 0)
    for stage in stages:
        total[stage.dst_node] = total.get(stage.dst_node, 0) + stage.num_rows
    order: list[int] = []
    num_sent = dict.fromkeys(node_to_slices, 0)
    for stage in stages:
        node = stage.dst_node
        if node not in node_to_slices:
            continue
        sent_rows[node] += stage.num_rows
        due = -(-node_to_slices[node] * sent_rows[node] // total[node])
        order += [node] * (due - num_sent[node])
        num_sent[node] = due
    return order
