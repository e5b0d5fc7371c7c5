"""Pure functions from what ranks or nodes send each other to a schedule of one-to-one transfers.

``decompose`` splits a node-to-node matrix into stages: ``exact`` by Birkhoff's decomposition, ``few`` by our own rule
with far fewer stages; ``spread_out`` is the baseline. ``make_schedule`` adds what happens within nodes and says which
bytes go where; ``check_schedule`` proves it right. ``cost`` models time, ``worst_case`` has FAST's bounds. Source:
FAST (Lei et al., NSDI 2026).
"""

from fusco.schedule.check import check_schedule as check_schedule
from fusco.schedule.check import find_faults as find_faults
from fusco.schedule.cost import Links as Links
from fusco.schedule.cost import choose_mode as choose_mode
from fusco.schedule.cost import schedule_us as schedule_us
from fusco.schedule.cost import stages_us as stages_us
from fusco.schedule.decomposition import decompose as decompose
from fusco.schedule.schedule import Schedule as Schedule
from fusco.schedule.schedule import make_schedule as make_schedule
from fusco.schedule.spread_out import spread_out as spread_out
from fusco.schedule.stages import Stages as Stages
from fusco.schedule.stages import lower_bound_bytes as lower_bound_bytes
from fusco.schedule.transfers import Transfers as Transfers
from fusco.schedule.warm_up import warm_up as warm_up
