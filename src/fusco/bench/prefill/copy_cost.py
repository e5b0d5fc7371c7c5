"""What it costs to copy an expert for a batch: so many rows as an expert computes meanwhile, as ranks measure it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from fusco.bench.harness.stopwatch import RankTimer
from fusco.core.balance import Balance, BatchPlan
from fusco.fsdp import Experts, FuscoDispatcher

_NUM_CALLS = 5  # that are timed


def with_measured_copies(
    balance: Balance, dispatcher: FuscoDispatcher, experts: Experts, num_topk: int, num_rows: int
) -> Balance:
    """Return a balance, the same on all ranks, for copies that nothing hides, as on the CPU; a collective.

    Each rank copies an expert to the next one, and computes ``num_rows`` rows; the slowest rank's times count.
    """
    weights, num_experts = experts.weights(), experts.num_experts
    stack = experts.local("down_proj")
    hidden = stack.shape[2 if experts.is_transposed else 1]
    x = torch.zeros(num_rows, hidden, dtype=stack.dtype, device=stack.device)
    num_ranks, num_local = dispatcher.group.size(), len(stack)
    if num_ranks == 1 or stack.is_cuda:  # where copies are beside products
        return balance
    comm = dispatcher.communicator(num_experts, num_topk, x, balance.spare_places)
    ranks = np.arange(num_ranks)
    copies = np.stack((ranks * num_local, (ranks + 1) % num_ranks, np.zeros_like(ranks)), axis=1)
    homes, rows = np.repeat(ranks, num_local), np.zeros(num_experts, np.int64)
    plan = BatchPlan.of_copies(rows, homes, num_ranks, balance, copies, is_aim_held=True)
    sizes = torch.full((num_local,), num_rows // num_local, dtype=torch.int64, device=x.device)
    sizes[0] += num_rows % num_local
    timer = RankTimer(dispatcher.group, "cpu")
    copy_ms = timer.median_ms(lambda: comm.prefetch_experts(list(weights.values()), plan, 1), _NUM_CALLS)
    rows_ms = timer.median_ms(lambda: experts.run(x, sizes), _NUM_CALLS)
    return replace(balance, rows_per_copy=round(copy_ms / rows_ms * num_rows))
