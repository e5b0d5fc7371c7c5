"""Dispatch plan with what the compiled loops of the CPU read."""

from __future__ import annotations

from dataclasses import dataclass

from fusco.core.groups import Groups
from fusco.core.placement import ExpertPlacement
from fusco.cpu.kernels.plan_pairs import PlannedPairs, plan_pairs
from fusco.planner.dispatch_plan import DispatchPlan
from fusco.planner.distribution import NodeRouting
from fusco.planner.forwarding import NodeForwarding
from fusco.planner.sending import SendingStage


@dataclass(frozen=True, kw_only=True)
class CpuPlan(DispatchPlan):
    """See ``DispatchPlan``; ``pairs`` has its distribution, and more."""

    pairs: PlannedPairs


def make_plan(
    *,
    rank: int,
    placement: ExpertPlacement,
    groups: Groups,
    forwarding: NodeForwarding,
    routing: NodeRouting,
    expert_alignment: int,
    static_rows: int | None,
    sending_stages: tuple[SendingStage, ...],
) -> CpuPlan:
    """Make the plan of ``fusco.planner.dispatch_plan.make_plan``; see there."""
    topology = groups.topology
    node = topology.rank_to_node[rank]
    rank_to_local = tuple(
        local if topology.rank_to_node[each] == node else -1 for each, local in enumerate(topology.rank_to_local)
    )
    pairs = plan_pairs(routing, placement, rank, rank_to_local, expert_alignment, static_rows)
    return CpuPlan(
        rank=rank,
        placement=placement,
        groups=groups,
        forwarding=forwarding,
        routing=routing,
        distribution=pairs.distribution,
        sending_stages=sending_stages,
        pairs=pairs,
    )
