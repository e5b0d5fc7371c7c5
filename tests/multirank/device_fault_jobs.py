"""Functions on ranks: a fault befalls one of them, with kernels of the others under way."""

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
    """How a rank fared: its error (``""`` if none), who is blamed, when, and how long closing took."""

    kind: str
    peers: tuple[int, ...]
    text: str
    raised_at: float
    closing_s: float
    does_device_work: bool


def endure(
    group: dist.ProcessGroup,
    fault: Fault,
    static: fusco.StaticRows | None,
    is_host_blind: bool,
    ranks_per_node: int | None,
) -> DeviceFate:
    """Rounds of dispatch and combine until something fails.

    With ``is_host_blind`` the host waits for its device by torch's means, so that the device's own limit must end it,
    or the network's guard.
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
