"""View of the rows that ranks compute, by layer, and of what copies of busy experts in spare places leave."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fusco.cli.explore.views import ExpertsView
from fusco.cli.wording import plural, ratio
from fusco.core.balance import Balance
from fusco.core.lanes import IntArray
from fusco.core.placement import ExpertPlacement
from fusco.placement import plan_batch


def experts_view(
    rows: Sequence[IntArray],
    placement: ExpertPlacement,
    num_ranks: int,
    balance: Balance,
    layers: Sequence[int],
    ranks_per_node: int,
) -> ExpertsView:
    """Plan each layer; ``rows`` has the rows of all ranks for each expert, int64 (E,), of each of ``layers``."""
    homes = np.array(placement.expert_to_rank)
    plans = [plan_batch(of_layer, homes, num_ranks, balance, ranks_per_node) for of_layer in rows]
    before = [round(plan.busiest_over_mean_before, 4) for plan in plans]
    after = [round(plan.busiest_over_mean, 4) for plan in plans]
    return ExpertsView(
        **about_experts(before, after, layers, balance.spare_places),
        spare_places=balance.spare_places,
        layers=list(layers),
        before=[plan.loads_before.tolist() for plan in plans],
        after=[plan.loads.tolist() for plan in plans],
        ratio_before=before,
        ratio_after=after,
        copies=[len(plan.ranks) for plan in plans],
    )


def about_experts(
    before: Sequence[float], after: Sequence[float], layers: Sequence[int], spare_places: int
) -> dict[str, str]:
    """Return what ``View`` has, from the busiest rank over the mean in each layer, without and with copies."""
    reading = "Rows that each rank's experts compute, over the mean"
    if spare_places:
        places = plural(spare_places, "spare place")
        reading += f": without copies, then with copies of busy experts in {places} a rank, planned for the batch"
    title = _finding(before, after, layers, spare_places)
    return {"anchor": "experts", "question": "Is work even?", "title": title, "reading": f"{reading}."}


def _finding(before: Sequence[float], after: Sequence[float], layers: Sequence[int], spare_places: int) -> str:
    worst = int(np.argmax(before))
    start = f"In layer {layers[worst]} the busiest rank" if len(layers) > 1 else "The busiest rank"
    start += f" computes {ratio(before[worst])} times the mean"
    if not spare_places or before[worst] - max(after) < 0.01:
        return start
    every = "every layer" if len(layers) > 1 else "it"
    verb = "brings" if spare_places == 1 else "bring"
    return f"{start}; {plural(spare_places, 'spare place')} a rank {verb} {every} to {ratio(max(after))} at most"
