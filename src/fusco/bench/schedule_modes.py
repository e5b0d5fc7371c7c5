"""One matrix scheduled in every mode: stages, lengths, and modelled times."""

from __future__ import annotations

from dataclasses import dataclass

from fusco.schedule import Links, Stages, choose_mode, decompose, lower_bound_bytes, spread_out, stages_us
from fusco.schedule.stages import IntArray


@dataclass(frozen=True, kw_only=True)
class ModeRecord:
    """The schedule of a matrix in one mode. Bytes are those of a node; ``ratio`` is length over lower bound.

    ``modelled_us`` is the time of the stages by the links given; ``dst_node``, ``num_bytes`` and ``duration_bytes`` are
    those of ``Stages``.
    """

    matrix: str
    num_nodes: int
    ranks_per_node: int
    latency_us: float
    internode_gbs: float
    mode: str
    is_chosen: bool
    lower_bound_bytes: int
    total_bytes: int
    ratio: float
    num_stages: int
    modelled_us: float
    dst_node: list[list[int]]
    num_bytes: list[list[int]]
    duration_bytes: list[int]


def schedule_in_every_mode(matrix: IntArray) -> dict[str, Stages]:
    """Return the stages of every mode; ``decompose``'s in ascending order of length, as they are executed."""
    return {
        "exact": decompose(matrix, mode="exact").shortest_first(),
        "few": decompose(matrix, mode="few").shortest_first(),
        "spread-out": spread_out(matrix),
    }


def compare_modes(matrix: IntArray, name: str, ranks_per_node: int, links: Links) -> list[ModeRecord]:
    """Return a record for every mode; the one that ``choose_mode`` chooses is marked."""
    bound, chosen = lower_bound_bytes(matrix), choose_mode(matrix, ranks_per_node, links)
    return [
        ModeRecord(
            matrix=name,
            num_nodes=len(matrix),
            ranks_per_node=ranks_per_node,
            latency_us=links.latency_us,
            internode_gbs=links.internode_gbs,
            mode=mode,
            is_chosen=mode == chosen,
            lower_bound_bytes=bound,
            total_bytes=stages.total_bytes,
            ratio=round(stages.total_bytes / bound, 6) if bound else 1.0,
            num_stages=stages.num_stages,
            modelled_us=round(stages_us(stages, ranks_per_node, links), 3),
            dst_node=stages.dst_node.tolist(),
            num_bytes=stages.num_bytes.tolist(),
            duration_bytes=stages.duration_bytes.tolist(),
        )
        for mode, stages in schedule_in_every_mode(matrix).items()
    ]
