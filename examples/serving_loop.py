"""Four processes serve tokens; one is killed and started again at random, and the others go on.

python examples/serving_loop.py --seconds 20

Every process is a rank with two of eight experts. After a kill the others shrink and serve on without the experts that
were lost; the new process joins at their next call of ``grow``. Every output is checked. The parent holds the store, as
a launcher does.
"""

import argparse
import multiprocessing as mp
import random
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import fusco

RANKS, EXPERTS, TOPK, TOKENS, HIDDEN = 4, 8, 2, 256, 512
SIZES = {"num_experts": EXPERTS, "num_topk": TOPK, "max_tokens_per_rank": TOKENS, "max_bytes_per_token": 4 * HIDDEN}
SETTINGS, STEPS_BETWEEN_GROWING = fusco.Settings(timeout_s=5.0), 10


def connect(rank: int, port: int, *, is_new: bool) -> tuple[fusco.Communicator, dist.Store]:
    """Return this process's communicator and the store: made together at first, joined later."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    if is_new:
        return fusco.Communicator.join(store, rank=rank, settings=SETTINGS, **SIZES), store
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    return fusco.Communicator(settings=SETTINGS, **SIZES), store


def step(comm: fusco.Communicator, generator: torch.Generator) -> None:
    """Serve one batch: expert e multiplies by e + 1, and each token adds up what is left of its experts."""
    x = torch.randn(TOKENS, HIDDEN, generator=generator)
    scores, topk_idx = torch.rand(TOKENS, EXPERTS, generator=generator).topk(TOPK)
    sent = comm.dispatch(x, topk_idx, scores)
    experts = comm.placement.rank_to_experts[comm.rank]
    blocks = sent.rows.split(sent.num_rows_per_expert.tolist())
    y = torch.cat([block * (expert + 1) for expert, block in zip(experts, blocks, strict=True)])
    out = comm.combine(y, sent.handle)
    factors = torch.arange(1.0, EXPERTS + 1)
    factors[list(comm.lost_experts)] = 0
    torch.testing.assert_close(out, x * (scores * factors[topk_idx]).sum(1, keepdim=True))


def is_over(comm: fusco.Communicator, ends_at: Any) -> bool:
    """Return what the lowest rank says, so that all ranks end after the same step: once all are there again."""
    says = torch.tensor([[float(time.monotonic() > ends_at.value and len(comm.ranks) == RANKS)]] * len(comm.ranks))
    splits = [int(each in comm.ranks) for each in range(RANKS)]
    return bool(comm.all_to_all(None, says, splits, splits)[0].item())


def serve(rank: int, port: int, is_new: bool, ends_at: Any, served: Any) -> None:  # noqa: FBT001
    """Serve until the time is up; after a failure go on with the ranks that are left."""
    torch.set_num_threads(1)
    comm, store = connect(rank, port, is_new=is_new)
    generator = torch.Generator().manual_seed(rank)
    has_failed, num_steps = False, 0
    while True:
        try:
            if has_failed:
                gone = comm.shrink()
                if comm.rank == comm.ranks[0]:
                    print(f"  without {gone}: experts {comm.lost_experts} are lost", flush=True)
                has_failed, num_steps = False, 0
            if len(comm.ranks) < RANKS and num_steps == STEPS_BETWEEN_GROWING and (came := comm.grow(store)):
                num_steps = 0
                if comm.rank == comm.ranks[0]:
                    print(f"  again with {came}", flush=True)
            step(comm, generator)
            num_steps = num_steps % STEPS_BETWEEN_GROWING + 1
            served[comm.rank] += TOKENS
            if is_over(comm, ends_at):
                break
        except fusco.ExcludedError:
            raise
        except fusco.PeerFailureError:
            has_failed = True
    comm.close()


def main() -> None:
    """Start the processes, kill one at random times, start another in its place, and print the tokens per second."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    choices, context = random.Random(options.seed), mp.get_context("spawn")  # noqa: S311
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    # Without locks, which a process would hold for ever if it was killed in the middle.
    served, ends_at = context.Array("q", RANKS, lock=False), context.Value("d", float("inf"), lock=False)

    def start(rank: int, *, is_new: bool) -> mp.process.BaseProcess:
        arguments = (rank, store.port, is_new, ends_at, served)
        process = context.Process(target=serve, args=arguments, daemon=True)
        process.start()
        return process

    processes = [start(rank, is_new=False) for rank in range(RANKS)]
    while not any(served):  # until all have started, and made the communicator
        time.sleep(0.01)
        require_alive(processes)
    began = time.monotonic()
    ends_at.value, kill_at = began + options.seconds, began + 0.2 * options.seconds
    while any(process.is_alive() for process in processes):
        before, since = sum(served), time.monotonic()
        time.sleep(1.0)
        rate = (sum(served) - before) / (time.monotonic() - since)
        print(f"{time.monotonic() - began:5.1f} s: {rate:,.0f} tokens/s", flush=True)
        require_alive(processes)
        if kill_at < time.monotonic() < ends_at.value - 0.3 * options.seconds:
            victim = choices.randrange(RANKS)
            print(f"  rank {victim} is killed", flush=True)
            processes[victim].kill()
            processes[victim].join()
            processes[victim] = start(victim, is_new=True)
            kill_at = time.monotonic() + choices.uniform(0.2, 0.4) * options.seconds


def require_alive(processes: list[mp.process.BaseProcess]) -> None:
    """Raise if a process has failed."""
    codes = [process.exitcode for process in processes]
    if any(codes):
        for process in processes:
            process.kill()
        raise SystemExit(f"exit codes of the processes: {codes}")


if __name__ == "__main__":
    main()
