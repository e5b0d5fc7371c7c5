"""Pure functions from what ranks or nodes send each other to a schedule of one-to-one transfers.

``decompose`` splits a node-to-node matrix into stages: ``exact`` by Birkhoff's decomposition, ``few`` by our own rule
with far fewer stages; ``spread_out`` is the baseline. Source: FAST (Lei et al., NSDI 2026).
"""

from fusco.schedule.decomposition import decompose as decompose
from fusco.schedule.spread_out import spread_out as spread_out
from fusco.schedule.stages import Stages as Stages
from fusco.schedule.stages import lower_bound_bytes as lower_bound_bytes
from fusco.schedule.warm_up import warm_up as warm_up
