"""Order in which a rank sends its slices to other nodes, by the stages of a schedule.

In a stage every node sends to one node and receives from one, so no node receives from several at once (FAST section
4.2). Ranks do not wait for each other between stages. They only use the same order, each in proportion to its slices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fusco.planner.traffic import Traffic
from fusco.schedule import decompose


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
