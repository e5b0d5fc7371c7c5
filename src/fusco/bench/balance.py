"""Imbalance of experts' rows in real routing, before and after busy experts are copied to spare places."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from fusco.bench.harness.environment import Measurement, record_of
from fusco.bench.inputs.traffic import Trace, Workload
from fusco.core.balance import Balance
from fusco.core.lanes import IntArray
from fusco.core.placement import ExpertPlacement
from fusco.placement import plan_batch
from fusco.placement.placement import warm_up_placement

_REPEATS = 5  # of a plan; the least time counts


@dataclass(frozen=True)
class Costs:
    """What decides when a copy pays.

    The defaults are those of an expert of Qwen3-30B-A3B, 3 x 2048 x 768 in bfloat16, at 50 GB/s, and of a row of it at
    500 TFLOP/s: computed, not measured.
    """

    expert_bytes: int = 9_437_184
    link_gbs: float = 50.0
    row_us: float = 0.0189

    @property
    def copy_us(self) -> float:
        """Time in which a rank receives one expert."""
        return self.expert_bytes / self.link_gbs / 1e3


@dataclass(frozen=True, kw_only=True)
class BalanceRecord(Measurement):
    """One layer and number of ranks, with consecutive experts at home; the batch is the whole trace.

    ``bytes_moved`` are those of all copies, ``copy_ms`` is the time of the rank that receives most, and
    ``break_even_tokens`` are the tokens of all ranks in a batch with this routing from which on copies that nothing
    hides take less time than they save; ``None`` if they save nothing. ``plan_us`` is the time of one plan, the call
    from Python included.
    """

    trace: str
    layer: int
    ranks: int
    spare_places: int
    num_tokens: int
    busiest_over_mean_before: float
    busiest_over_mean_after: float
    experts_copied_per_rank: float
    limit: str
    bytes_moved: int
    copy_ms: float
    break_even_tokens: int | None
    plan_us: float


@dataclass(frozen=True)
class CopiedExpert:
    """An expert that is copied for one batch, from its home, and the rows that the copy computes."""

    expert: int
    home: int
    rank: int
    num_rows: int


@dataclass(frozen=True, kw_only=True)
class BalancedBatch:
    """The plan of one batch: rows of each rank without copies and with them, the copies, and what limits the plan."""

    spare_places: int
    busiest_over_mean_before: float
    busiest_over_mean_after: float
    limit: str
    rows_before: list[int]
    rows_after: list[int]
    copies: list[CopiedExpert]


def balance_batch(workload: Workload, spare_places: int) -> BalancedBatch:
    """Plan a workload's batch, with experts at home where its placement has them; copies cost nothing."""
    placement = workload.placement
    rows = np.zeros(placement.num_experts, dtype=np.int64)
    for rank in range(placement.world_size):
        ids = workload.routing(rank).topk_idx.numpy()
        rows += np.bincount(ids[ids >= 0], minlength=len(rows))
    plan = plan_batch(rows, placement.expert_to_rank, placement.world_size, Balance(spare_places))
    copies = zip(plan.experts.tolist(), plan.ranks.tolist(), plan.rows.tolist(), strict=True)
    return BalancedBatch(
        spare_places=spare_places,
        busiest_over_mean_before=round(plan.busiest_over_mean_before, 4),
        busiest_over_mean_after=round(plan.busiest_over_mean, 4),
        limit=plan.limit,
        rows_before=plan.loads_before.tolist(),
        rows_after=plan.loads.tolist(),
        copies=[CopiedExpert(expert, placement.expert_to_rank[expert], rank, moved) for expert, rank, moved in copies],
    )


def measure_balance(
    traces: Sequence[Trace],
    num_ranks: Sequence[int],
    num_experts: int,
    balance: Balance,
    costs: Costs,
    first_layer: int = 0,
) -> Iterator[BalanceRecord]:
    """Plan each layer for each number of ranks; ``ValueError`` if experts do not divide among ranks."""
    warm_up_placement()
    for ranks in num_ranks:
        homes = np.array(ExpertPlacement.contiguous(num_experts, ranks).expert_to_rank)
        for layer, trace in enumerate(traces, first_layer):
            yield _measure(trace, layer, homes, ranks, balance, costs)


def _measure(trace: Trace, layer: int, homes: IntArray, ranks: int, balance: Balance, costs: Costs) -> BalanceRecord:
    ids = trace.topk_idx
    rows = np.bincount(ids[ids >= 0], minlength=len(homes))
    times = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        plan = plan_batch(rows, homes, ranks, balance)
        times.append((time.perf_counter() - start) * 1e6)
    most_received = int(np.bincount(plan.ranks, minlength=ranks).max())
    copies_us = most_received * costs.copy_us
    return record_of(
        BalanceRecord,
        plan,
        balance,
        trace=trace.name,
        layer=layer,
        ranks=ranks,
        num_tokens=len(ids),
        busiest_over_mean_before=round(plan.busiest_over_mean_before, 4),
        busiest_over_mean_after=round(plan.busiest_over_mean, 4),
        experts_copied_per_rank=round(len(plan.ranks) / ranks, 4),
        bytes_moved=len(plan.ranks) * costs.expert_bytes,
        copy_ms=round(copies_us / 1e3, 4),
        break_even_tokens=plan.break_even_tokens(len(ids), copies_us, costs.row_us),
        plan_us=round(min(times), 1),
    )
