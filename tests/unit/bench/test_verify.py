"""Verification in benchmarks: a negative control, so that a check that cannot fail would show."""

import torch
from workloads import workload

from fusco.bench.inputs.traffic import WorldInput
from fusco.bench.shuffle.factory import Shuffle
from fusco.bench.shuffle.verification import verify
from fusco.core.profile import CallProfile


def test_a_shuffle_that_loses_a_row_is_not_verified():
    load = workload("uniform", 1, 1, num_experts=4, tokens=6, hidden=8, num_topk=2)
    x, routing = load.rows(0), load.routing(0)
    order = routing.topk_idx.view(-1).argsort(stable=True)
    counts = routing.topk_idx.view(-1).bincount(minlength=4).tolist()

    def combine(rows, _):
        by_slot = torch.empty_like(rows)
        by_slot[order] = rows
        terms = by_slot.float().view(6, 2, 8) * routing.topk_weights[:, :, None]
        return terms.sum(1).to(rows.dtype)

    def shuffle_with(permutation):
        return Shuffle(lambda: (x[order // 2][permutation], counts, None), combine, CallProfile)

    straight = torch.arange(12)
    assert verify(shuffle_with(straight), load, WorldInput.of(load), 0) == []
    swapped = straight.clone()
    swapped[[0, -1]] = swapped[[-1, 0]]
    errors = verify(shuffle_with(swapped), load, WorldInput.of(load), 0)
    assert "2 of 12 dispatched rows are wrong, first row 0" in errors[0]
    assert "combined rows are off" in errors[1]
