"""Functions on ranks: a fault hits one rank while kernels of the others run."""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from fault_jobs import Fault
from on_device import load

import fusco

# Of calls that take a few milliseconds each on an idle GPU. Ranks took more than 8 s to connect over NCCL while both
# parts of the tests shared one H100, three test processes each.
TIMEOUT_S = 8.0 * load()
_NUM_TOKENS, _HIDDEN, _NUM_ROUNDS = 96, 64, 3
_SECONDS_OF_REPLAYS = 0.5  # before a rank is killed


@dataclass(frozen=True)
class DeviceFate:
    """Outcome of a rank: its error (``""`` if none), the ranks named, the time, and how long closing took."""

    kind: str
    peers: tuple[int, ...]
    text: str
    raised_at: float
    closing_s: float
    does_device_work: bool


@dataclass(frozen=True)
class ReplayFate(DeviceFate):
    """Outcome of a rank that replays a graph.

    Attributes:
        num_right: replays with the right values.
        num_stale: replays with values that are neither right nor all NaN.
        num_poisoned: replays with NaN only, those after the error included.
        check_us: time of a check that raises nothing, in microseconds.

    """

    num_right: int
    num_stale: int
    num_poisoned: int
    check_us: float


class Replays:
    """A graph of a dispatch and a combine, replayed with other rows in each step."""

    def __init__(self, comm: fusco.Communicator) -> None:
        self._comm = comm
        self._x = torch.zeros(_NUM_TOKENS, _HIDDEN, device="cuda")
        self._ids = torch.rand(_NUM_TOKENS, 8, device="cuda").topk(4).indices
        self._static = fusco.StaticRows(comm.topology.world_size * _NUM_TOKENS * 4)
        self.num_right = self.num_stale = self.num_poisoned = 0
        self._run()  # compiles and loads the kernels, which a capture may not
        comm.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._sent, self._out = self._run()

    def _run(self) -> tuple[fusco.Dispatched, torch.Tensor]:
        sent = self._comm.dispatch(self._x, self._ids, static=self._static)
        return sent, self._comm.combine(sent.rows, sent.handle)

    def step(self, number: int) -> None:
        """Replay, and look at the sums before anything is checked."""
        self._x.fill_(number)
        self._graph.replay()
        out = self._out.cpu()
        is_right, is_poisoned = bool((out == 4 * number).all()), bool(out.isnan().all())
        self.num_right += is_right
        self.num_poisoned += is_poisoned
        self.num_stale += not (is_right or is_poisoned)


def replay_until_failure(group: dist.ProcessGroup, victim: int, struck: Path) -> ReplayFate:
    """Replay a graph until ``check`` raises, and twice more; the victim is killed at any moment."""
    rank = dist.get_rank(group)
    comm = fusco.Communicator(
        group,
        num_experts=8,
        num_topk=4,
        max_tokens_per_rank=_NUM_TOKENS,
        max_bytes_per_token=4 * _HIDDEN,
        settings=fusco.Settings(timeout_s=60.0),
        device="cuda",
    )
    replays = Replays(comm)

    def kill() -> None:
        struck.write_text(str(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)

    replays.step(1)  # so all ranks have captured the graph
    if rank == victim:
        threading.Timer(_SECONDS_OF_REPLAYS, kill).start()
    kind, peers, text, check_us = "", (), "", 0.0
    for number in range(2, 1_000_000):
        replays.step(number)
        began = time.perf_counter()
        try:
            comm.check()
        except fusco.PeerFailureError as error:
            kind, peers, text = type(error).__name__, error.peers, str(error)
            break
        check_us = 1e6 * (time.perf_counter() - began)
    raised_at = time.monotonic()
    for later in range(2):
        replays.step(-1 - later)
    comm.close()
    return ReplayFate(
        kind,
        peers,
        text,
        raised_at,
        time.monotonic() - raised_at,
        float(torch.ones(1000, device="cuda").sum()) == 1000.0,
        replays.num_right,
        replays.num_stale,
        replays.num_poisoned,
        check_us,
    )


def run_until_failure(
    group: dist.ProcessGroup,
    fault: Fault,
    static: fusco.StaticRows | None,
    is_host_blind: bool,
    ranks_per_node: int | None,
) -> DeviceFate:
    """Run rounds of dispatch and combine until one fails.

    With ``is_host_blind`` the host waits in ``torch.cuda.synchronize``, so that the device's timeout or the NCCL
    watchdog must end the wait.
    """
    rank = dist.get_rank(group)
    comm = fusco.Communicator(
        group,
        num_experts=8,
        num_topk=4,
        max_tokens_per_rank=_NUM_TOKENS,
        max_bytes_per_token=2 * _HIDDEN,
        ranks_per_node=ranks_per_node,
        settings=fusco.Settings(timeout_s=TIMEOUT_S),
        device="cuda",
    )
    x = torch.randn(_NUM_TOKENS, _HIDDEN, device="cuda").bfloat16()
    weights, ids = torch.rand(_NUM_TOKENS, 8, device="cuda").topk(4)

    def one_round() -> None:
        sent = comm.dispatch(x, ids, weights, static=static)
        if is_host_blind:
            torch.cuda.synchronize()
        comm.combine(sent.rows, sent.handle)
        comm.synchronize()

    one_round()
    fault.plant(rank)
    kind, peers, text = "", (), ""
    try:
        for _ in range(_NUM_ROUNDS):
            one_round()
    except fusco.PeerFailureError as error:
        kind, peers, text = type(error).__name__, error.peers, str(error)
    raised_at = time.monotonic()
    comm.close()
    closing_s = time.monotonic() - raised_at
    works = float(torch.ones(1000, device="cuda").sum()) == 1000.0
    return DeviceFate(kind, peers, text, raised_at, closing_s, works)
