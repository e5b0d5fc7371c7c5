"""Calls of ranks that are left after others have left, compared with those of a new communicator of the same ranks."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import TypeAlias

import torch
import torch.distributed as dist
from rank_setup import Setup

import fusco
from fusco.bench.harness.stopwatch import measure_in_turn
from generator import random_of

Spent: TypeAlias = tuple[float, float]  # seconds, and those of this process on a core

_NUM_EXPERTS, _HIDDEN = 24, 2048
_NUM_CALLS = {16: 3000, 512: 600}  # of each communicator, by tokens
_NUM_PARTS = 10


@dataclass(frozen=True, kw_only=True)
class Case:
    """Ranks of which the first ``num_left`` stay, and what they dispatch."""

    num_ranks: int
    num_left: int
    ranks_per_node: int
    num_tokens: int
    rails: str = ""

    def __str__(self) -> str:
        nodes = f"{self.ranks_per_node} a node{', rails ' * bool(self.rails)}{self.rails}"
        return f"{self.num_left} of {self.num_ranks} ranks, {nodes}, {self.num_tokens} tokens"


CASES = tuple(
    Case(num_ranks=num_ranks, num_left=num_left, ranks_per_node=ranks_per_node, num_tokens=num_tokens, rails=rails)
    for num_ranks, num_left, ranks_per_node in ((4, 2, 4), (4, 3, 4), (3, 2, 1), (6, 4, 2))
    for rails in (("",) if num_left <= ranks_per_node else ("", "lo"))
    for num_tokens in _NUM_CALLS
)


def time_in_turn(group: dist.ProcessGroup, case: Case) -> dict[str, list[Spent]]:
    """Let the last ranks leave; time a dispatch and a combine on the communicator that goes on and on a new one."""
    os.environ["FUSCO_RAILS"] = case.rails
    left = range(case.num_left)
    setup = Setup(
        ranks_per_node=case.ranks_per_node,
        num_experts=_NUM_EXPERTS,
        max_tokens=case.num_tokens,
        max_bytes_per_token=2 * _HIDDEN,
        expert_placement=tuple(expert % len(left) for expert in range(_NUM_EXPERTS)),  # so that none is lost
    )
    shrunk = setup.open(group)
    shrunk.shrink(range(case.num_left, case.num_ranks))
    if dist.get_rank(group) not in left:
        return {}
    x = torch.ones(case.num_tokens, _HIDDEN, dtype=torch.bfloat16)
    scores = torch.rand(case.num_tokens, _NUM_EXPERTS, generator=random_of("throughput", shrunk.rank))
    ids = scores.topk(setup.num_topk).indices

    def timed(comm: fusco.Communicator) -> Spent:
        begin_s, begin_on_core_s = time.perf_counter(), time.process_time()
        sent = comm.dispatch(x, ids)
        comm.combine(sent.rows, sent.handle)
        return time.perf_counter() - begin_s, time.process_time() - begin_on_core_s

    setup = replace(setup, ranks_per_node=min(case.ranks_per_node, case.num_left))
    with shrunk, setup.open(dist.new_group([*left], use_local_synchronization=True)) as new:
        num_calls = _NUM_CALLS[case.num_tokens]
        variants = {"shrunk": shrunk, "new": new}
        return measure_in_turn(variants, timed, lambda: None, num_warm_ups=20, num_iterations=num_calls)


@dataclass(frozen=True)
class Ratio:
    """Time of a call of the communicator that goes on, divided by that of a new one.

    Attributes:
        elapsed: of the median call of the slowest rank.
        of_parts: the same of tenths of the calls, in order.
        on_core: of the time of all ranks on a core.
        new_us: the time of the new one.
    """

    elapsed: float
    of_parts: tuple[float, ...]
    on_core: float
    new_us: float

    def __str__(self) -> str:
        parts = f"tenths {min(self.of_parts):.3f} to {max(self.of_parts):.3f}"
        return f"{self.elapsed:.3f} of {self.new_us:.0f} us ({parts}; on cores {self.on_core:.3f})"

    @classmethod
    def of(cls, ranks: Sequence[Mapping[str, Sequence[Spent]]]) -> Ratio:
        """Return the ratio of what ``time_in_turn`` has measured on each rank that is left."""
        slowest, on_cores = dict[str, list[float]](), dict[str, list[float]]()
        for name in ranks[0]:
            calls = [[*zip(*of_ranks, strict=True)] for of_ranks in zip(*(of[name] for of in ranks), strict=True)]
            slowest[name] = [max(elapsed_s) for elapsed_s, _ in calls]
            on_cores[name] = [sum(on_core_s) for _, on_core_s in calls]

        def ratio(seconds: Mapping[str, list[float]], part: slice = slice(None)) -> float:
            return median(seconds["shrunk"][part]) / median(seconds["new"][part])

        size = len(slowest["new"]) // _NUM_PARTS
        parts = tuple(ratio(slowest, slice(begin, begin + size)) for begin in range(0, size * _NUM_PARTS, size))
        return cls(ratio(slowest), parts, ratio(on_cores), median(slowest["new"]) * 1e6)
