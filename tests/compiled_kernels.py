"""Compiles what CPU ranks run on import: ranks that are forked afterwards need not read it from the disk cache.

That takes four ranks on two cores 0.75 of the 0.85 seconds in which a world makes its first communicator.
"""

import numpy as np

from fusco.control.node_memory import warm_up_node_memory
from fusco.core.topology import Topology
from fusco.cpu.kernels.warm_up import warm_up_cpu
from fusco.planner.balancer import BALANCERS
from fusco.planner.sending import warm_up_stages
from fusco.planner.traffic import Traffic

warm_up_node_memory()
warm_up_cpu()
warm_up_stages()
for balancer in BALANCERS.values():
    balancer(Traffic(Topology((0, 0, 1, 1)), np.ones((2, 2, 2), dtype=np.int64)))
