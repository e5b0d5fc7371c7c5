"""A job of Ray: one actor for each rank, in a process group made by their first one. `python ray_job.py --ranks 16`.

All ranks of a machine are a node. Ray restarts no rank on its own here: when one dies, all others raise an error that
names it, and the job ends.
"""

from __future__ import annotations

import argparse
import os
import socket

import ray


class Rank:
    """A rank: joins the process group, makes a communicator, dispatches and combines once."""

    def address(self) -> tuple[str, int]:
        """Return an address of this machine with a free port, for rank 0."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return ray.util.get_node_ip_address(), probe.getsockname()[1]

    def run(self, rank: int, num_ranks: int, address: tuple[str, int], *, on_gpu: bool) -> str:
        """Return what arrived at this rank."""
        import torch
        import torch.distributed as dist

        import fusco

        os.environ.update(MASTER_ADDR=address[0], MASTER_PORT=str(address[1]))
        dist.init_process_group("nccl" if on_gpu else "gloo", rank=rank, world_size=num_ranks)
        device = "cuda:0" if on_gpu else "cpu"  # Ray shows each actor its own GPU
        x = torch.randn(512, 1024, dtype=torch.bfloat16, device=device)
        weights, ids = torch.randn(512, 8 * num_ranks, device=device).softmax(1).topk(4)
        sizes = {"num_experts": 8 * num_ranks, "num_topk": 4, "max_tokens_per_rank": 512, "hidden": 1024}
        with fusco.Communicator(**sizes, device=device) as comm:
            sent = comm.dispatch(x, ids, weights)
            out = comm.combine(sent.rows, sent.handle)
        dist.destroy_process_group()
        return f"rank {rank} on {socket.gethostname()}: {len(sent.rows)} rows arrived, {tuple(out.shape)} returned"


def main() -> None:
    """Start the ranks and print what each returns."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--gpus", action="store_true", help="one GPU for each rank")
    args = parser.parse_args()
    ray.init()
    actor = ray.remote(num_cpus=1, num_gpus=int(args.gpus))(Rank)
    ranks = [actor.remote() for _ in range(args.ranks)]
    address = ray.get(ranks[0].address.remote())
    for line in ray.get([each.run.remote(i, args.ranks, address, on_gpu=args.gpus) for i, each in enumerate(ranks)]):
        print(line)


if __name__ == "__main__":
    main()
