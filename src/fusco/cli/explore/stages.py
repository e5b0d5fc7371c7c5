"""Views of stages over time, by the cost model of ``fusco.schedule``: lanes of nodes, and a replay."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fusco.cli.explore.views import ReplayView, TimelineView
from fusco.cli.wording import duration, plural, ratio
from fusco.core.lanes import IntArray
from fusco.schedule import Links, Stages, choose_mode, decompose, lower_bound_bytes, spread_out, stages_us

MAX_NODES = 256  # a decomposition of more takes seconds

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class StagedFlows:
    """Flows between nodes in order of stages, a column each; ranks of a node share its bytes evenly.

    Attributes:
        src, dst: nodes, int64 (flows,).
        begin_us, end_us: float64 (flows,).
        starts_us: float64 (stages,), when each stage begins.
        total_us: the end of the last stage.
    """

    src: IntArray
    dst: IntArray
    begin_us: FloatArray
    end_us: FloatArray
    starts_us: FloatArray
    total_us: float

    @classmethod
    def of_stages(cls, stages: Stages, ranks_per_node: int, links: Links) -> StagedFlows:
        """Place every message of the stages in time, each stage after the one before it and a latency.

        >>> stages = Stages(np.array([[1, 0], [1, -1]]), np.array([[800, 400], [100, 0]]), np.array([800, 100]))
        >>> flows = StagedFlows.of_stages(stages, 2, Links(latency_us=5, internode_gbs=0.1))
        >>> flows.begin_us.tolist(), flows.end_us.tolist()
        ([5.0, 5.0, 14.0], [9.0, 7.0, 14.5])
        """
        lengths = links.internode_us(1) * stages.duration_bytes / ranks_per_node + links.latency_us
        ends = np.cumsum(lengths)
        starts = ends - lengths
        stage, src = np.nonzero(stages.num_bytes)
        begin = starts[stage] + links.latency_us
        end = begin + links.internode_us(1) * stages.num_bytes[stage, src] / ranks_per_node
        return cls(src, stages.dst_node[stage, src], begin, end, starts, float(ends[-1]) if len(ends) else 0.0)


def stage_views(node_bytes: IntArray, ranks_per_node: int, links: Links) -> list[TimelineView | ReplayView]:
    """Return lanes and replay of the schedule that ``choose_mode`` picks; nothing without traffic or above 256 nodes.

    ``node_bytes`` (N, N) is what nodes send each other.
    """
    bound = lower_bound_bytes(node_bytes)
    if not bound or len(node_bytes) > MAX_NODES:
        return []
    mode = choose_mode(node_bytes, ranks_per_node, links)
    stages = decompose(node_bytes, mode=mode).shortest_first()
    flows = StagedFlows.of_stages(stages, ranks_per_node, links)
    bound_us = links.internode_us(bound / ranks_per_node)
    diagonals_us = stages_us(spread_out(node_bytes), ranks_per_node, links)
    return [_timeline(flows, stages, bound_us, diagonals_us, links), _replay(flows, stages, ranks_per_node, links)]


def _timeline(flows: StagedFlows, stages: Stages, bound_us: float, diagonals_us: float, links: Links) -> TimelineView:
    over, plain = ratio(flows.total_us / bound_us), ratio(diagonals_us / bound_us)
    diagonals = f"; shifted diagonals would take {plain}" if plain != over else ", as would shifted diagonals"
    return TimelineView(
        anchor="time",
        question="What waits for what?",
        title=f"{plural(stages.num_stages, 'one-to-one stage')} take {duration(flows.total_us)}, {over} of the "
        f"bound{diagonals}",
        reading="When each node sends, and to which node. In a stage every node has one receiver and one sender, so "
        f"nothing queues. Modelled: {links.latency_us:g} us a stage, {links.internode_gbs:g} GB/s a rank.",
        lanes=[f"node {node}" for node in range(stages.num_nodes)],
        kinds=["network"],
        total_us=round(flows.total_us, 3),
        bound_us=round(bound_us, 3),
        marks_us=flows.starts_us.round(3).tolist(),
        of_lane=flows.src.tolist(),
        of_kind=[0] * len(flows.src),
        begin_us=flows.begin_us.round(3).tolist(),
        end_us=flows.end_us.round(3).tolist(),
        peer=flows.dst.tolist(),
    )


def _replay(flows: StagedFlows, stages: Stages, ranks_per_node: int, links: Links) -> ReplayView:
    busy_us = float((flows.end_us - flows.begin_us).sum())
    used = busy_us / (flows.total_us * stages.num_nodes)
    gbs = links.internode_gbs * ranks_per_node
    return ReplayView(
        anchor="replay",
        question="What moves when?",
        title=f"{used * stages.num_nodes:.3g} of {plural(stages.num_nodes, 'node')} send at any moment, on average",
        reading="Move the slider. Lines are flows in flight, from senders on the left to receivers on the right; bars "
        f"are what a node sends or receives, of {gbs:g} GB/s.",
        end="node",
        num_ends=stages.num_nodes,
        end_gbs=gbs,
        total_us=round(flows.total_us, 3),
        src=flows.src.tolist(),
        dst=flows.dst.tolist(),
        begin_us=flows.begin_us.round(3).tolist(),
        end_us=flows.end_us.round(3).tolist(),
        gbs=[gbs] * len(flows.src),
    )
