"""One of two ranks on hosts of their own, whose NCCL goes over rails; ``test_nccl_plugin`` and GPU scripts start two.

The first argument says what to do, the second, in JSON, where: ``{"rails": 2}`` plays two hosts on loopback addresses,
``{}`` takes the rails of a testbed's host, ``{"sockets": "rail0"}`` NCCL's own sockets instead.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

import fusco
from fusco.rails import Rail, nccl_plugin
from fusco.rails.board import TX_BYTES, Board

RANK = int(os.environ.get("RANK", "0"))  # pytest imports this file without it
SIZES = (1, 1000, (512 << 10) + 3, 5 << 20, 64 << 20)
FLAP_S = 6.0


def configure(where: dict[str, object]) -> Path | None:
    """Set the environment of NCCL; return the board."""
    os.environ["NCCL_HOSTID"] = f"host-{RANK}"
    if "sockets" in where:
        os.environ["NCCL_SOCKET_IFNAME"] = f"={where['sockets']}"
        os.environ["NCCL_NET"] = "Socket"
        return None
    board = Path(str(where.get("folder", tempfile.gettempdir())), f"board-{RANK}")
    rails = None
    if "rails" in where:
        rails = [Rail("lo", f"127.0.{RANK}.{i + 1}", (i,)) for i in range(int(str(where["rails"])))]
    os.environ.update(nccl_plugin(rails, worker=0, board=board))
    if rails:
        os.environ["NCCL_SOCKET_IFNAME"] = "=lo"
    return board


def rows(seed: int, size: int):
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randint(0, 256, (size,), dtype=torch.uint8, device="cuda", generator=generator)


def check(board: Path | None) -> None:
    """Compare what send, receive, all_reduce and all_to_all_single deliver, bit by bit."""
    for i, size in enumerate(SIZES):
        got = torch.empty(size, dtype=torch.uint8, device="cuda")
        operations = [dist.P2POp(dist.isend, rows(2 * i + RANK, size), 1 - RANK), dist.P2POp(dist.irecv, got, 1 - RANK)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        assert torch.equal(got, rows(2 * i + 1 - RANK, size)), f"send and receive of {size} bytes"
    for i, size in enumerate(SIZES[:-1]):
        one, other = (rows(100 + 2 * i + rank, 4 * size).view(torch.int32).float() / 7 for rank in (0, 1))
        mine = (one, other)[RANK].clone()
        dist.all_reduce(mine)
        assert torch.equal(mine, one + other), f"all_reduce of {size} numbers"
    sent, got = rows(200 + RANK, 2 << 20), torch.empty(2 << 20, dtype=torch.uint8, device="cuda")
    dist.all_to_all_single(got, sent)
    halves = [rows(200 + rank, 2 << 20).chunk(2)[RANK] for rank in (0, 1)]
    assert torch.equal(got, torch.cat(halves)), "all_to_all_single"
    report(board, "bit-equal")


def say(text: str) -> None:
    sys.stdout.write(f"rank {RANK}: {text}\n")
    sys.stdout.flush()


def report(board: Path | None, text: str) -> None:
    """Print a line with the bytes that this process has sent over each rail."""
    sent = ""
    if board is not None:
        opened = Board(board)
        row = next(each.row for each in opened.workers() if each.pid == os.getpid())
        sent = f", MB sent over each rail: {[opened.cell(row, i)[TX_BYTES] >> 20 for i in range(len(opened.rails()))]}"
    say(f"{text}{sent}")


def speed(board: Path | None) -> None:
    """Time messages of 128 MB in one direction, and all_to_all_single."""
    data = rows(RANK, 128 << 20)
    for name in ("send", "all_to_all_single"):
        times = []
        for _ in range(4):
            dist.barrier()
            torch.cuda.synchronize()
            begin = time.perf_counter()
            if name == "send":
                dist.send(data, 1) if RANK == 0 else dist.recv(data, 0)
            else:
                dist.all_to_all_single(torch.empty_like(data), data)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - begin)
        moved = data.nbytes if name == "send" else data.nbytes // 2
        report(board, f"{name} {moved / min(times[1:]) / 1e9:.3f} GB/s a direction")


def flow(board: Path | None) -> None:
    """Send in one direction for some seconds, as the traffic beside which others are measured."""
    data, num = rows(RANK, 64 << 20), 0
    goes_on, end, begin = torch.ones(1, device="cuda"), time.monotonic() + 2 * FLAP_S, time.monotonic()
    while goes_on.item():
        dist.send(data, 1) if RANK == 0 else dist.recv(data, 0)
        goes_on.fill_(time.monotonic() < end)
        dist.all_reduce(goes_on, op=dist.ReduceOp.MIN)
        num += 1
    report(board, f"a flow of {num * data.nbytes / (time.monotonic() - begin) / 1e9:.3f} GB/s")


def flap(board: Path | None) -> None:
    """Reduce for some seconds, while rails go down and up; every result is compared."""
    one, other = (rows(300 + rank, 16 << 20).view(torch.int32).float() for rank in (0, 1))
    expected, end, num, longest = one + other, time.monotonic() + FLAP_S, 0, 0.0
    goes_on = torch.ones(1, device="cuda")
    while goes_on.item():
        begin = time.monotonic()
        mine = (one, other)[RANK].clone()
        dist.all_reduce(mine)
        assert torch.equal(mine, expected), f"all_reduce #{num}"
        longest, num = max(longest, time.monotonic() - begin), num + 1
        goes_on.fill_(time.monotonic() < end)
        dist.all_reduce(goes_on, op=dist.ReduceOp.MIN)
    report(board, f"{num} all_reduces of 16 MB right, the longest {1e3 * longest:.0f} ms")


def new_communicator(num_tokens: int, hidden: int) -> tuple[fusco.Communicator, tuple[torch.Tensor, ...]]:
    """Return a communicator of two nodes, and the arguments of its dispatch."""
    options = {"num_experts": 8, "num_topk": 2, "max_tokens_per_rank": num_tokens, "max_bytes_per_token": 2 * hidden}
    comm = fusco.Communicator(**options, ranks_per_node=1, device="cuda", settings=fusco.Settings(timeout_s=20.0))
    torch.manual_seed(RANK)
    weights, ids = torch.randn(num_tokens, 8, device="cuda").softmax(1).topk(2)
    return comm, (torch.randn(num_tokens, hidden, device="cuda").bfloat16(), ids, weights)


def shuffle(board: Path | None) -> None:
    """Time dispatch and combine; say what the rows that cross take at the rate of RAILS_GBITS, all rails together."""
    comm, (x, ids, weights) = new_communicator(8192, 4096)
    num_crossing = int((ids // 4 != RANK).any(1).sum())
    wire_ms = 1e3 * num_crossing * x.shape[1] * 2 * 8 / (float(os.environ["RAILS_GBITS"]) * 1e9)
    times = {"dispatch": [], "combine": []}
    for _ in range(12):
        begin = time.perf_counter()
        sent = comm.dispatch(x, ids, weights)
        torch.cuda.synchronize()
        middle = time.perf_counter()
        comm.combine(sent.rows, sent.handle)
        torch.cuda.synchronize()
        times["dispatch"].append(middle - begin)
        times["combine"].append(time.perf_counter() - middle)
    shown = ", ".join(f"{name} median {1e3 * sorted(each)[6]:.2f} ms" for name, each in times.items())
    report(board, f"{shown}, {num_crossing} rows cross, wire {wire_ms:.2f} ms each")


def kill(board: Path | None) -> None:
    """Dispatch and combine until the peer, which kills itself, is named."""
    comm, (x, ids, weights) = new_communicator(512, 2048)
    try:
        for i in range(1000):
            sent = comm.dispatch(x, ids, weights)
            out = comm.combine(sent.rows, sent.handle)
            torch.cuda.synchronize()
            if i == 0:
                error = (out.float() - x.float()).abs().max().item()
                report(board, f"dispatch and combine of fusco, error against x {error:.4f}")
            if RANK == 1 and i == 10:
                os.kill(os.getpid(), signal.SIGKILL)
            if i == 10:
                killed = time.monotonic()
    except fusco.FuscoError as error:
        say(f"{time.monotonic() - killed:.2f} s after the kill: {type(error).__name__}: {error}")
        os._exit(0)


def main() -> None:
    what, where = sys.argv[1], json.loads(sys.argv[2])
    board = configure(where)
    torch.cuda.set_device(RANK % torch.cuda.device_count())
    dist.init_process_group("cpu:gloo,cuda:nccl")
    {"check": check, "speed": speed, "flap": flap, "flow": flow, "shuffle": shuffle, "kill": kill}[what](board)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
