"""Configuration of ``fusco bench shuffle``, the same on all ranks."""

from __future__ import annotations

from dataclasses import dataclass

from fusco.bench.inputs.traffic import Workload
from fusco.core.config import Settings
from fusco.core.topology import Topology


@dataclass(frozen=True, kw_only=True)
class ShuffleRun:
    """Several workloads that differ in their routing only, and how to measure them."""

    workloads: tuple[Workload, ...]  # one for each kind of traffic, at least one
    variants: tuple[str, ...]  # names of ``fusco.bench.shuffle.variants``
    settings: Settings  # of fusco's communicators
    balancer: str  # a name of ``fusco.BALANCERS``
    num_iterations: int  # how many are timed
    device: str = "cpu"  # ``"cpu"`` or ``"cuda"``
    num_sms: int | None = None  # on CUDA, the maximum number of SMs that fusco may take
    has_timeline: bool = False  # whether one dispatch and combine of fusco are recorded
    # on a testbed, the rate of a rank's rails in each direction, in 10^9 bytes per second; else 0
    rank_gbs: float = 0.0

    def __post_init__(self) -> None:
        shapes = {
            (load.topology, load.placement, load.tokens, load.hidden, load.num_topk, load.dtype)
            for load in self.workloads
        }
        if len(shapes) != 1:
            raise ValueError(f"workloads of one run must be of one shape, got {len(shapes)}")

    @property
    def shape(self) -> Workload:
        """One of the workloads, for the fields that all share."""
        return self.workloads[0]

    @property
    def topology(self) -> Topology:
        """The nodes of the ranks."""
        return self.shape.topology

    @property
    def has_nodes(self) -> bool:
        """True if there are several nodes."""
        return self.topology.num_nodes > 1
