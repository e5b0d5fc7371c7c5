"""Functions on ranks: a fault hits one rank while kernels of the others run."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from fault_jobs import TIMEOUT_S, Fault

import fusco

_NUM_TOKENS, _HIDDEN, _NUM_ROUNDS = 96, 64, 3


@dataclass(frozen=True)
class DeviceFate:
    """Outcome of a rank: its error (``""`` if none), the ranks named, the time, and how long closing took."""

    kind: str
    peers: tuple[int, ...]
    text: str
    raised_at: float
    closing_s: float
    does_device_work: bool


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
