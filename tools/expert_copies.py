"""Measure the plan of a batch, copies of experts, and moves of all experts beside plain sends, on two ranks.

``python tools/expert_copies.py [--device cuda] [--json FILE]``. Experts are those of Qwen3-30B-A3B: hidden 2048, width
768, in bfloat16, 9.4 MB each; on CPUs a small layer. On CUDA plans and copies are replayed from a graph. Exit code 1 if
a moved or copied expert is not its original.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import fusco
from fusco.bench.harness.environment import Measurement, hardware, versions
from fusco.bench.harness.json_lines import write_json_lines
from fusco.bench.prefill.job import make_routing
from fusco.bench.ranks.local_world import LocalWorld
from fusco.core.stopwatch import Stopwatch
from fusco.placement import Balance, BatchPlan, plan_batch

NUM_RANKS, NUM_EXPERTS, NUM_TOPK, SPARE_PLACES = 2, 128, 8, 4
_NUM_WARM_UPS, _NUM_ITERATIONS = 3, 20


@dataclass(frozen=True, kw_only=True)
class CopiesRecord(Measurement):
    """One way to do something: the slowest rank's median, and the rate of the busiest rank's bytes."""

    what: str
    variant: str
    ms: float
    gbs: float | None
    verified: bool
    kind: str = "copies"


def measure(group: dist.ProcessGroup, device: str, tokens: int, hidden: int, inner: int) -> list[tuple[Any, ...]]:
    """Return what, variant, milliseconds, bytes of this rank and whether it was right."""
    rank, local = group.rank(), NUM_EXPERTS // NUM_RANKS
    generator = torch.Generator().manual_seed(1)
    shape = (3 * inner * hidden,)  # of one expert: gate, up and down
    whole = torch.randint(-99, 99, (NUM_EXPERTS, 1), generator=generator).to(torch.bfloat16)
    weights = whole[rank * local :][:local].expand(local, *shape).contiguous().to(device)
    expert_bytes = weights[0].numel() * 2
    shape_of_ids = 1, tokens, NUM_EXPERTS, NUM_TOPK
    of_ranks = [make_routing("skew1.5", shape_of_ids, each, NUM_RANKS, 0)[0] for each in range(NUM_RANKS)]
    topk_idx, rows = of_ranks[rank].to(device), torch.stack(of_ranks).flatten().bincount(minlength=NUM_EXPERTS).numpy()
    placement = fusco.ExpertPlacement.contiguous(NUM_EXPERTS, NUM_RANKS).in_places(local + SPARE_PLACES)
    found, balance = [], Balance(SPARE_PLACES)
    with fusco.Communicator(
        group,
        num_experts=NUM_EXPERTS,
        num_topk=NUM_TOPK,
        max_tokens_per_rank=tokens,
        max_bytes_per_token=2 * hidden,
        expert_placement=placement,
        device=device,
    ) as comm:
        plan = comm.plan_batch(topk_idx, balance)
        expected = plan_batch(rows, placement.expert_to_rank, NUM_RANKS, balance)
        mine = plan.experts[plan.ranks == rank].tolist()
        most = max((plan.ranks == each).sum() for each in range(NUM_RANKS))
        copies = comm.prefetch_experts([weights], plan, SPARE_PLACES)[0]
        is_right = bool((copies[: len(mine)].cpu() == whole[mine]).all())
        ms = _timed(group, device, lambda: comm.plan_batch(topk_idx, balance))
        found.append(("plan", "host", ms, 0, _are_equal(plan, expected)))
        ms = _timed(group, device, lambda: comm.prefetch_experts([weights], plan, SPARE_PLACES))
        found.append(("copies", "host", ms, most * expert_bytes, is_right))
        if device == "cuda":
            copied = whole[mine], most * expert_bytes
            found += _in_graphs(group, comm, topk_idx, balance, weights, copied, expected)

        old = torch.arange(NUM_EXPERTS).view(NUM_RANKS, local)
        both = [old.numpy(), old.flip(0).numpy()]

        def move() -> None:
            comm.move_experts([weights], *both)
            both.reverse()

        ms = _timed(group, device, move)
        if both[0][rank][0] != rank * local:
            move()
        is_right = bool((weights.cpu() == whole[rank * local :][:local]).all())
        found.append(("move_experts", "fusco", ms, local * expert_bytes, is_right))
    other = torch.empty_like(weights)

    def exchange() -> None:
        ends = [dist.P2POp(call, each, 1 - rank) for call, each in ((dist.isend, weights), (dist.irecv, other))]
        for work in dist.batch_isend_irecv(ends):
            work.wait()
        weights.copy_(other)  # into its places, as move_experts does

    ms = _timed(group, device, exchange)
    first = (rank + _NUM_WARM_UPS + _NUM_ITERATIONS) % NUM_RANKS * local  # each call swaps the experts of both
    is_right = bool((weights.cpu() == whole[first:][:local]).all())
    found.append(("move_experts", "batch_isend_irecv", ms, local * expert_bytes, is_right))
    return found


def _are_equal(plan: BatchPlan, expected: BatchPlan) -> bool:
    pairs = [(getattr(plan, name), getattr(expected, name)) for name in ("experts", "ranks", "rows", "loads")]
    return all(np.array_equal(ours, theirs) for ours, theirs in pairs)


def _in_graphs(
    group: dist.ProcessGroup,
    comm: fusco.Communicator,
    topk_idx: torch.Tensor,
    balance: Balance,
    weights: torch.Tensor,
    copied_here: tuple[torch.Tensor, int],
    expected: BatchPlan,
) -> list[tuple[Any, ...]]:
    """Measure replays of the plan on the device, and of copies as it says."""
    planned, copied = (torch.cuda.CUDAGraph() for _ in range(2))
    plan = comm.plan_batch_on_device(topk_idx, balance)
    comm.prefetch_experts([weights], plan, SPARE_PLACES)
    comm.synchronize()
    with torch.cuda.graph(planned):
        plan = comm.plan_batch_on_device(topk_idx, balance)
    with torch.cuda.graph(copied):
        (copies,) = comm.prefetch_experts([weights], plan, SPARE_PLACES)
    plan_ms = _timed(group, "cuda", planned.replay)
    copies_ms = _timed(group, "cuda", copied.replay)
    whole, num_bytes = copied_here
    is_right = bool((copies[: len(whole)].cpu() == whole).all())
    is_planned = _are_equal(plan.wait(), expected)
    return [("plan", "device", plan_ms, 0, is_planned), ("copies", "device", copies_ms, num_bytes, is_right)]


def _timed(group: dist.ProcessGroup, device: str, call: Callable[[], object]) -> float:
    """Return the median of calls that each begin on idle ranks, in milliseconds."""
    stopwatch, times = Stopwatch(device), []
    for _ in range(_NUM_WARM_UPS + _NUM_ITERATIONS):
        if device == "cuda":
            torch.cuda.synchronize()
        dist.barrier(group)
        start = stopwatch.mark()
        call()
        end = stopwatch.mark()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(stopwatch.elapsed_ms(start, end))
    return median(times[_NUM_WARM_UPS:])


def new_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--json", type=Path)
    return parser


def main() -> int:
    """Measure on two ranks, print a table and write records."""
    chosen = new_parser().parse_args()
    sizes = (8192, 2048, 768) if chosen.device == "cuda" else (128, 256, 64)
    with LocalWorld(NUM_RANKS, chosen.device) as world:
        ranks = world.run(measure, NUM_RANKS, chosen.device, *sizes)
    records = []
    for of_ranks in zip(*ranks, strict=True):
        what, variant, _, num_bytes, _ = of_ranks[0]
        ms = max(each[2] for each in of_ranks)
        gbs = round(num_bytes / ms / 1e6, 1) if num_bytes else None
        is_right = all(each[4] for each in of_ranks)
        records.append(
            CopiesRecord(
                what=what,
                variant=variant,
                ms=round(ms, 4),
                gbs=gbs,
                verified=is_right,
                versions=versions(),
                hardware=hardware(chosen.device),
            )
        )
        rate = f"{gbs} GB/s" if gbs else ""
        sys.stdout.write(f"{what:14} {variant:18} {ms:9.4f} ms  {rate:12} {'right' if is_right else 'WRONG'}\n")
    write_json_lines(records, chosen.json)
    return int(not all(record.verified for record in records))


if __name__ == "__main__":
    sys.exit(main())
