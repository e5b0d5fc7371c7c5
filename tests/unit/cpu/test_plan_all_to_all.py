"""Plans of all-to-alls: kept for calls of the same sizes, and made anew for anything else that they depend on."""

import pytest
import torch

from fusco import MismatchError, Topology
from fusco.engine.all_to_all import plan_all_to_all
from fusco.engine.base import AllToAllRequest
from fusco.schedule.cost import CPU_LINKS, CUDA_LINKS
from fusco.schedule.rank_schedule import NUM_BYTES

COUNTS = ([1, 2, 1, 3], [3, 4, 2, 4])  # of each rank: rows for each rank, then rows from each


def plan(counts=COUNTS, width=4, mode=None, ranks_per_node=1, rank=0, links=CPU_LINKS):
    rows = torch.zeros(3, width, dtype=torch.uint8)
    request = AllToAllRequest(input=rows, output=rows, send_rows=[], receive_rows=[], mode=mode)
    return plan_all_to_all(request, counts, Topology.of_equal_nodes(2, ranks_per_node), rank, links)


def test_a_plan_is_kept_for_calls_of_the_same_sizes():
    first = plan()
    assert [flow.pieces[:, NUM_BYTES].tolist() for flow in first.sends_across] == [[8]]
    assert plan([tuple(counts) for counts in COUNTS]) is first


@pytest.mark.parametrize(
    "change",
    [
        {"counts": ([1, 2, 1, 4], [4, 4, 2, 4])},
        {"width": 8},
        {"mode": "exact"},
        {"ranks_per_node": 2},
        {"rank": 1},
        {"links": CUDA_LINKS},
    ],
)
def test_another_plan_is_made_for_everything_that_it_depends_on(change):
    assert plan(**change) is not plan()


def test_sizes_that_differ_between_ranks_are_an_error_also_after_a_plan_that_is_kept():
    plan()
    with pytest.raises(MismatchError, match=r"rank 0 sends 2 rows to rank 1, which expects 9$"):
        plan(([1, 2, 1, 3], [3, 4, 9, 4]))
