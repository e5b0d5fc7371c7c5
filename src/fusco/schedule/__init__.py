"""Schedules of all-to-alls: pure functions from a traffic matrix to one-to-one transfers.

``decompose`` splits a node-to-node matrix into stages: ``exact`` by Birkhoff's decomposition, ``few`` by fusco's rule
with far fewer stages; ``spread_out`` is the baseline. ``make_schedule`` adds the transfers within nodes and assigns
every byte to a transfer; ``check_schedule`` proves the result correct. ``cost`` models the time. Source: FAST (Lei et
al., NSDI 2026).
"""

from fusco.schedule.check import check_schedule as check_schedule, find_faults as find_faults
from fusco.schedule.cost import (
    Links as Links,
    choose_mode as choose_mode,
    schedule_us as schedule_us,
    stages_us as stages_us,
)
from fusco.schedule.decomposition import decompose as decompose, spread_out as spread_out
from fusco.schedule.schedule import Schedule as Schedule, make_schedule as make_schedule, warm_up as warm_up
from fusco.schedule.stages import Stages as Stages, Transfers as Transfers, lower_bound_bytes as lower_bound_bytes
