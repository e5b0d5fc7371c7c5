"""``python moves.py EXPERT_BYTES RATE SHARE PATH``: a rank that moves experts; rank 0 prints what it measured.

Two lines of JSON; all times are in seconds and of the slowest rank. First, for each move there and back: its time, that
of the bound of the busiest NIC, and the bytes that must cross between nodes. Experts are compared with the new
placement, bit for bit. Then, when the path exists, for iterations of dispatch and combine with
and without steps of a move at a share of the time between them: the median dispatch, the whole time, and the progress
of the move.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import fusco
from fusco.placement import plan_moves

PLACES, NUM_MOVES, NUM_ROUNDS, NUM_ITERATIONS = 5, 4, 2, 4
NUM_TOKENS, HIDDEN, STEP_BYTES = 256, 1024, 1 << 17


def placements(num_ranks: int, ranks_per_node: int) -> tuple[np.ndarray, np.ndarray]:
    """Return consecutive experts with one spare place a rank, and a shuffled placement with copies in all of them."""
    random, num_experts = np.random.default_rng(0), (PLACES - 1) * num_ranks
    old = np.full((num_ranks, PLACES), -1)
    old[:, :-1] = np.arange(num_experts).reshape(num_ranks, -1)
    new = random.permutation([*range(num_experts), *[0] * ranks_per_node, *range(1, num_ranks - ranks_per_node + 1)])
    return old, new.reshape(num_ranks, PLACES)


class Mover:
    """A rank with experts in their old places."""

    def __init__(self, comm: fusco.Communicator, expert_bytes: int, rate: int) -> None:
        self.comm, self.rate, self.expert_bytes = comm, rate, expert_bytes
        self.placed, self.other = placements(comm.topology.world_size, comm.topology.ranks_per_node)
        self.weights = [torch.zeros(PLACES, expert_bytes, dtype=torch.uint8)]
        for place, expert in enumerate(self.placed[comm.rank].tolist()):
            if expert >= 0:
                self.weights[0][place] = self.bits(expert)

    def bits(self, expert: int) -> torch.Tensor:
        random = torch.Generator().manual_seed(expert)
        return torch.randint(0, 256, (self.expert_bytes,), generator=random, dtype=torch.uint8)

    def turn(self) -> None:
        """Note that a move is complete; compare its experts."""
        self.placed, self.other = self.other, self.placed
        for place, expert in enumerate(self.placed[self.comm.rank].tolist()):
            assert expert < 0 or torch.equal(self.weights[0][place], self.bits(expert)), (place, expert)

    def move(self) -> dict[str, float]:
        plan = plan_moves(self.placed, self.other, self.expert_bytes, self.comm.topology)
        seconds, _ = timed(lambda: self.comm.move_experts(self.weights, self.placed, self.other))
        self.turn()
        bound_s = plan.bound_bytes * 8 / self.rate
        return {"move_s": seconds, "bound_s": bound_s, "bytes": int(plan.node_bytes.sum())}

    def iterate(self, share: float) -> dict[str, float]:
        """Dispatch and combine, with steps of a move after each unless the share is 0."""
        pace = fusco.Pace(step_bytes=STEP_BYTES, share=share or 1.0)
        task = self.comm.start_moving_experts(self.weights, self.placed, self.other, pace=pace)
        random = torch.Generator().manual_seed(self.comm.rank)
        x = torch.randn(NUM_TOKENS, HIDDEN, generator=random)
        ids = torch.randint(self.comm.placement.num_experts, (NUM_TOKENS, 2), generator=random)
        dispatch_s = []

        def all_iterations() -> None:
            for _ in range(NUM_ITERATIONS):
                seconds, sent = timed(lambda: self.comm.dispatch(x, ids))
                dispatch_s.append(seconds)
                self.comm.combine(sent.rows, sent.handle)
                if share:
                    task.step()

        seconds, _ = timed(all_iterations)
        return {
            "share": share,
            "dispatch_s": statistics.median(dispatch_s),
            "iterations_s": seconds,
            "progress": task.progress,
        }


def timed(function: Any) -> tuple[float, Any]:
    """Return the time of a call on the slowest rank, and its result."""
    dist.barrier()
    begin = time.perf_counter()
    result = function()
    seconds = torch.tensor(time.perf_counter() - begin)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return float(seconds), result


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    expert_bytes, rate, share = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    with fusco.Communicator(
        num_experts=2 * dist.get_world_size(),
        num_topk=2,
        max_tokens_per_rank=NUM_TOKENS,
        max_bytes_per_token=4 * HIDDEN,
        settings=fusco.Settings(timeout_s=30.0),
    ) as comm:
        mover = Mover(comm, expert_bytes, rate)
        say(comm.rank, [mover.move() for _ in range(NUM_MOVES)])
        while comm.rank == 0 and not Path(sys.argv[4]).exists():
            time.sleep(0.01)
        say(comm.rank, [mover.iterate(each) for _ in range(NUM_ROUNDS) for each in (0.0, share)])


def say(rank: int, records: list[dict[str, float]]) -> None:
    if rank == 0:
        sys.stdout.write(json.dumps(records) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
