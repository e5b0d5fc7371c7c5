"""Which ranks have which experts: plans from loads, pure numpy and numba.

``plan_batch`` copies busy experts into spare places for one batch, ``plan_placement`` places experts for the loads that
are to be expected, ``plan_moves`` says which rank sends which expert to which.
``Communicator(expert_placement=...)`` and ``Communicator.place`` take placements. A *place* is memory of a rank for one
expert's weights; an expert's *home* is the place that it has without copies.
"""

from fusco.core.balance import Balance as Balance, BatchPlan as BatchPlan
from fusco.placement.batch import plan_batch as plan_batch
from fusco.placement.moves import MovePlan as MovePlan, plan_moves as plan_moves
from fusco.placement.placement import PlannedPlacement as PlannedPlacement, plan_placement as plan_placement
