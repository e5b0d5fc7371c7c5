"""Small workloads of benchmarks."""

from fusco import ExpertPlacement, Topology
from fusco.bench.inputs.traffic import Workload


def workload(pattern, nodes=2, per_node=2, num_experts=8, **more):
    """Two tokens of one element for each rank, and consecutive experts, unless others are given."""
    topology = Topology.of_equal_nodes(nodes * per_node, per_node)
    placement = ExpertPlacement.contiguous(num_experts, topology.world_size)
    shape = {"tokens": 2, "hidden": 1, "num_topk": 1, "placement": placement, **more}
    return Workload(pattern=pattern, topology=topology, **shape)
