"""Simulator: how long a collective takes on a cluster, and what binds.

It is fed by the library's own planner and schedule, and moves no bytes. ``cluster`` describes ranks, links and their
constants; ``demand`` is what must move; ``systems`` turn it into flows (``flows``) over ``links``, whose rates
``maxmin`` computes. Pure: it imports planner, placement, schedule and plain values; only commands and benchmarks import
it. Every figure is a prediction.
"""

from fusco.simulate.cluster import (
    Cluster as Cluster,
    Constant as Constant,
    Fabric as Fabric,
    load_cluster as load_cluster,
    write_cluster as write_cluster,
)
from fusco.simulate.demand import Demand as Demand
from fusco.simulate.result import SimulationResult as SimulationResult
from fusco.simulate.run import simulate as simulate
from fusco.simulate.systems import SYSTEMS as SYSTEMS
