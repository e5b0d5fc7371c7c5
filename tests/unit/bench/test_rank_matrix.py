"""Matrices of the all-to-all benchmark: of the size asked for, and of the shape of their name."""

from typing import get_args

import numpy as np
import pytest
from workloads import workload

from fusco import ExpertPlacement
from fusco.bench.inputs.matrices import ExchangeMatrix, make_rank_bytes, rows_of_routing
from fusco.bench.inputs.traffic import Trace

BY_HAND = workload(
    "trace",
    placement=ExpertPlacement.explicit([0, 0, 1, 3], 4),
    num_topk=2,
    trace=Trace(np.array([[0, 1], [2, 3]]), "by hand"),
)


def test_a_token_goes_once_for_each_of_its_experts():
    assert rows_of_routing(BY_HAND).tolist() == [[2, 1, 0, 1]] * 4


@pytest.mark.parametrize("matrix", get_args(ExchangeMatrix))
def test_ranks_send_others_what_was_asked_for(matrix):
    rank_bytes = make_rank_bytes(matrix, 4, 1_000_000, skew=0.8, seed=3, workload=BY_HAND)
    to_others = rank_bytes.sum() - np.trace(rank_bytes)
    assert 4_000_000 - 16 <= to_others <= 4_000_000


def test_a_trace_that_stays_at_home_needs_no_bytes():
    one = workload("trace", 1, 1, num_experts=1, tokens=1, trace=Trace(np.array([[0]]), "by hand"))
    assert make_rank_bytes("trace", 1, 100, workload=one).tolist() == [[0]]
