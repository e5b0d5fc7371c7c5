"""``python shuffles.py TOKENS``: a rank that dispatches and combines until it is killed or a call fails.

Even ranks have TOKENS tokens, odd ones none. Results are compared with the input, bit for bit. Rank 0 prints a line
after each iteration. A rank whose call fails prints the error and ends.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist

import fusco

HIDDEN, TIMEOUT_S = 1024, 10.0


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    num_tokens, rng = int(sys.argv[1]), torch.Generator().manual_seed(rank)
    comm = fusco.Communicator(
        num_experts=2 * world_size,
        num_topk=2,
        max_tokens_per_rank=num_tokens,
        max_bytes_per_token=4 * HIDDEN,
        balancer=fusco.BALANCERS["static"],  # even ranks forward for even ranks: odd ones send no row to another host
        settings=fusco.Settings(timeout_s=TIMEOUT_S),
    )
    count = 0
    try:
        while True:
            n = 0 if rank % 2 else num_tokens
            x = torch.randn(n, HIDDEN, generator=rng)
            # Each token goes to a rank of each host; half a row from each is the row again, exactly.
            ids = torch.randint(world_size, (n, 2), generator=rng) + torch.tensor([0, world_size])
            output = comm.dispatch(x, ids, torch.full((n, 2), 0.5))
            y = comm.combine(output.rows, output.handle)
            assert torch.equal(x, y), f"rank {rank}, iteration {count}: rows differ"
            count += 1
            if rank == 0:
                say(f"iteration {count}")
    except fusco.PeerFailureError as error:
        say(f"rank {rank} failed: {error}")
        os._exit(3)


if __name__ == "__main__":
    main()
