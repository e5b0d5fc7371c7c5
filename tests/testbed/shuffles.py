"""``python shuffles.py BALANCER EVEN ODD``: a rank that dispatches and combines until it is killed or a call fails.

Even ranks have EVEN tokens, odd ones ODD. Results are compared with the input, bit for bit. Ranks 0 and 1 print a line
after each iteration, with the bytes that the dispatch has sent. A rank whose call fails prints the error and ends.
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
    balancer, *num_tokens = sys.argv[1], *map(int, sys.argv[2:])
    rng = torch.Generator().manual_seed(rank)
    comm = fusco.Communicator(
        num_experts=2 * world_size,
        num_topk=2,
        max_tokens_per_rank=max(num_tokens),
        max_bytes_per_token=4 * HIDDEN,
        balancer=fusco.BALANCERS[balancer],
        settings=fusco.Settings(timeout_s=TIMEOUT_S),
    )
    count = 0
    try:
        while True:
            n = num_tokens[rank % 2]
            x = torch.randn(n, HIDDEN, generator=rng)
            # Each token goes to a rank of each host; half a row from each is the row again, exactly.
            ids = torch.randint(world_size, (n, 2), generator=rng) + torch.tensor([0, world_size])
            output = comm.dispatch(x, ids, torch.full((n, 2), 0.5))
            num_bytes = comm.profile.internode_row_bytes
            y = comm.combine(output.rows, output.handle)
            assert torch.equal(x, y), f"rank {rank}, iteration {count}: rows differ"
            count += 1
            if rank < 2:
                say(f"iteration {count}: {num_bytes} bytes")
    except fusco.PeerFailureError as error:
        say(f"rank {rank} failed: {error}")
        os._exit(3)


if __name__ == "__main__":
    main()
